"""The page of tools/demo.py in a real browser: for tests/demo_browser_test.py and tests/demo_screenshots.py.

Chromium and its driver come from the system (Debian: apt-get install chromium chromium-driver), Selenium from pip.
"""

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
PATIENCE = 120  # seconds, on a busy machine
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def missing():
    """Why there is no browser, in a sentence; `None` where there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "Selenium is not installed: pip install selenium"
    if not any(map(shutil.which, CHROMIUM)) or not shutil.which("chromedriver"):
        return "Chromium or its driver is not installed: apt-get install chromium chromium-driver"
    return None


@contextlib.contextmanager
def page(*model_dirs, stderr=None, **options):
    """The page of these runs, in a process of its own: yields `(address, process)` once it listens.

    Without `examples=True`, the page shows nothing before it is asked.
    """
    command = [sys.executable, str(ROOT / "tools/demo.py"), "--port=0", *(f"--model_dir={path}" for path in model_dirs)]
    command += [f"--{name}={value}" for name, value in {"examples": False, **options}.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    try:
        address = next((line.strip() for line in process.stdout if line.startswith("http://")), None)
        if address is None:
            raise RuntimeError(f"the page ended with status {process.wait()} before it listened")
        yield address, process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextlib.contextmanager
def visitor(address, width=1240, height=1000, dark=False, language="en-US"):
    """A `Visitor` with a headless Chromium of its own, who reads a language and has opened the page."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, CHROMIUM)))
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync",
        "--hide-scrollbars", f"--window-size={width},{height}", f"--lang={language}", f"--accept-lang={language}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.set_script_timeout(PATIENCE)
        yield Visitor(driver, f"{address}/?__theme={'dark' if dark else 'light'}")
    finally:
        driver.quit()


class Visitor:
    """Somebody who looks at the page.

    Args:
        driver: of Selenium.
        address: of the page.
    """

    def __init__(self, driver, address):
        self.driver, self.address = driver, address
        self.open()

    def open(self):
        """Opens the page anew."""
        self.driver.get(self.address)
        self._listen()

    def _listen(self):
        self.wait("button.primary")
        time.sleep(0.5)  # its buttons hear a moment after they are to be seen

    def another(self, host):
        """Opens the page in one more tab, at another address of this machine: six connections go to each."""
        self.driver.switch_to.new_window("tab")
        self.driver.get(re.sub(r"//[^:/]+", f"//{host}", self.address))
        self._listen()

    def all(self, css):
        """The elements of a CSS selector that are to be seen."""
        from selenium.webdriver.common.by import By

        return [found for found in self.driver.find_elements(By.CSS_SELECTOR, css) if found.is_displayed()]

    def until(self, holds, what):
        """Waits until a function gives something that is true, and returns it."""
        from selenium.common.exceptions import StaleElementReferenceException

        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(StaleElementReferenceException):
                found = holds()
                if found:
                    return found
            time.sleep(0.05)
        raise TimeoutError(f"the page has no {what} after {PATIENCE} s; it shows: {self.text()[:3000]}")

    def wait(self, css, text=""):
        """The first element of a selector that is to be seen, and whose text holds `text`, once there is one."""
        holds = lambda: next((found for found in self.all(css) if text in found.text), None)  # noqa: E731
        return self.until(holds, f"{css} with {text!r}")

    def contents(self, css):
        """The texts of the elements of a selector, as they stand in the page."""
        script = "return [...document.querySelectorAll(arguments[0])].map(found => found.textContent)"
        return self.driver.execute_script(script, css)

    def text(self):
        return self.driver.execute_script("return document.body.innerText")

    def tab(self, name):
        """Opens a tab by its name."""

        def click():
            found = next((tab for tab in self.all("button[role=tab]") if tab.text.strip() == name), None)
            return found and self._click(found)

        self.until(click, f"tab {name}")

    def press(self, name):
        """Presses a button by its id."""
        self._click(self.wait(f"button#{name}"))

    def _click(self, element):
        """As a mouse does, also in an SVG picture."""
        script = "arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true, composed: true}))"
        self.driver.execute_script(script, element)
        return True

    def type(self, name, text):
        """Has a text in a text box, as if it were pasted. A box that has just appeared may put its own text back."""
        script = """
            const box = arguments[0]; box.focus(); box.value = arguments[1];
            box.dispatchEvent(new Event('input', {bubbles: true}));
        """

        def paste():
            box = self.wait(f"#{name} textarea, #{name} input")
            self.driver.execute_script(script, box, text)
            time.sleep(0.5)
            return self.driver.execute_script("return arguments[0].value === arguments[1]", box, text)

        self.until(paste, f"box {name} that takes a text")

    def fill(self, name, number):
        """Has a number in the number box of a slider."""
        box = self.wait(f"#{name} input[type=number]")
        self.driver.execute_script(
            "const box = arguments[0]; box.focus(); box.value = arguments[1];"
            "for (const kind of ['input', 'change', 'blur']) box.dispatchEvent(new Event(kind, {bubbles: true}));",
            box,
            str(number),
        )
        time.sleep(0.3)

    def empty(self, name):
        """Deletes what the number box of a slider holds, by keys."""
        from selenium.webdriver.common.keys import Keys

        box = self.wait(f"#{name} input[type=number]")
        box.click()
        box.send_keys(Keys.CONTROL + "a", Keys.DELETE)

    def pick(self, css, number=0):
        """Clicks one of the elements of a selector."""
        self._click(self.until(lambda: (self.all(css)[number : number + 1] or [None])[0], f"{css} number {number}"))

    def requests(self):
        """The addresses of all that the browser asked for since it was asked last."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ] + [event["params"]["url"] for event in events if event["method"] == "Network.webSocketCreated"]

    def save(self, path, css):
        """Writes a picture of an element."""
        self.wait(css).screenshot(str(path))


def is_here(address):
    """Whether a request stays on this machine."""
    parts = urlsplit(address)
    if parts.scheme in ("data", "blob", "about", "chrome"):
        return True
    return parts.hostname == "localhost" or parts.hostname.startswith("127.")


def memory(process):
    """MB of a process and its children."""
    pids = [process.pid, *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]
    found = [re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
    return sum(int(match[1]) for match in found if match) / 1024


class Api:
    """A visitor without a browser, who asks as the page's own JavaScript does.

    Args:
        address: of the page.
    """

    def __init__(self, address):
        self.host, self.address = urlsplit(address).netloc, f"{address}/gradio_api/queue"
        self.session = secrets.token_hex(8)
        with urllib.request.urlopen(f"{address}/config", timeout=PATIENCE) as answer:
            config = json.load(answer)
        names = {component["id"]: component["props"].get("elem_id") for component in config["components"]}
        self.functions = {
            (names.get(target), event): dependency["id"]
            for dependency in config["dependencies"]
            for target, event in dependency["targets"]
        }

    def status(self, path, size, method="POST"):
        """The status of the answer to a request that announces a body of `size` bytes."""
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.putrequest(method, path)
            if size:
                connection.putheader("Content-Length", str(size))
            connection.endheaders()
            return connection.getresponse().status

    def ask(self, name, data, event="click", event_data=None, expect_failure=False):
        """What the page shows after a click on the component of an id: the first output of its handler.

        Args:
            name: id of the component.
            data: values of the handler's inputs; `None` for a state.
            event_data: of a click in a picture, such as `{"pick": "3", "run": "0"}`.
            expect_failure: whether `None` is the answer where Gradio itself refuses the request.
        """
        request = {"data": data, "fn_index": self.functions[name, event], "session_hash": self.session}
        body = json.dumps({**request, "event_data": event_data, "trigger_id": None}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{self.address}/join", body, headers), timeout=PATIENCE).close()
        with urllib.request.urlopen(f"{self.address}/data?session_hash={self.session}", timeout=PATIENCE) as stream:
            for line in stream:
                if not line.startswith(b"data:"):
                    continue
                message = json.loads(line.removeprefix(b"data:"))
                if message["msg"] == "process_completed":
                    if expect_failure and not message["success"]:
                        return None
                    assert message["success"], message
                    return message["output"]["data"][0]
        raise RuntimeError("the page ended its answer without a result")
