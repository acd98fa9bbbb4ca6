"""Makes the screenshots of docs/demo.md and of the README, with the helpers of the tests.

    python tests/demo_screenshots.py runs docs

The first folder holds the runs quickstart, dates and flat_resume, see docs/demo.md, or some of them; the second is
written to.
"""

import io
import sys
import time
from pathlib import Path

from browsing import page, visitor
from PIL import Image

WIDTH = 1180
MOST_BYTES = 200_000
MOST_SAVED = """
const saved = found => parseFloat((found.title.match(/saves ([-\\d.]+) bits/) || [0, 0])[1]);
const tokens = [...document.querySelectorAll('#remember-shown .token[data-pick]')];
return tokens.indexOf(tokens.slice(64).reduce((a, b) => saved(b) > saved(a) ? b : a));
"""


def shoot(look, path, first, last):
    """Writes what stands between two elements, both included, over the width of the page."""
    time.sleep(1)  # buttons and pictures fade in
    top, bottom = look.wait(first).rect, look.wait(last).rect
    look.driver.set_window_size(WIDTH, int(bottom["y"] + bottom["height"]) + 300)
    time.sleep(1)
    top, bottom = look.wait(first).rect, look.wait(last).rect
    image = Image.open(io.BytesIO(look.driver.get_screenshot_as_png())).convert("RGB")
    image = image.crop((0, max(0, int(top["y"]) - 12), image.width, int(bottom["y"] + bottom["height"]) + 12))
    image.save(path, "PNG", optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, at most {MOST_BYTES:,}")
    print(path, f"{path.stat().st_size:,} bytes")


def shoot_all(address, folder, names, dark=False):
    """The pictures of a page with these runs: in dark colours, only that of the memory."""
    with visitor(address, WIDTH, 1400, dark) as look:
        if "quickstart" in names:
            shoot_language_model(look, folder, dark)
        if "dates" in names and not dark:
            shoot_encoder_decoder(look, folder)
        if "flat_resume" in names and not dark:
            shoot_tagger(look, folder)


def shoot_language_model(look, folder, dark):
    if not dark:
        look.type("prompt", "The import statement")
        look.press("write")
        look.until(lambda: look.all("#written .written") and not look.all("#written .cursor"), "end of the text")
        shoot(look, folder / "demo-write.png", "#prompt", "#written .written")
        look.tab("Score")
        look.press("read")
        look.wait("#read-shown .facts")
        look.pick("#read-shown .token[data-pick]", 20)
        look.wait("#read-detail .bars")
        shoot(look, folder / "demo-read.png", "#read-shown .facts", "#read-detail .bars")
    look.tab("Memory")
    look.press("remember")
    look.wait("#remember-shown .facts")
    look.pick("#remember-shown .token[data-pick]", look.driver.execute_script(MOST_SAVED))
    look.wait("#remember-detail .picture svg")
    name = "demo-remember-dark.png" if dark else "demo-remember.png"
    shoot(look, folder / name, "#remember-shown .facts", "#remember-detail .picture")


def shoot_encoder_decoder(look, folder):
    if look.all("button[role=tab]"):
        look.tab("Encoder-decoders")
    look.press("translate")
    look.wait("#targets tr[data-pick]")
    look.pick("#targets tr[data-pick]", 0)
    look.wait("#cross .picture svg")
    shoot(look, folder / "demo-cross.png", "#targets .targets", "#cross .picture")


def shoot_tagger(look, folder):
    if look.all("button[role=tab]"):
        look.tab("Taggers")
    look.press("tag")
    look.wait("#tagged .picture svg")
    look.pick("#tagged g[data-pick='12']")
    look.wait("#tagged .item.asked")
    shoot(look, folder / "demo-lattice.png", "#tagged h4", "#tagged .note")
    look.pick("#tagged button[data-pick='out:委员会']")
    look.wait("#tagged h4", "Without")
    shoot(look, folder / "demo-without.png", "#tagged h4", "#tagged .picture")


def main(runs, folder):
    names = [name for name in ("quickstart", "dates", "flat_resume") if (Path(runs) / name).is_dir()]
    with page(*(Path(runs) / name for name in names)) as (address, _):
        for dark in (False, True):
            shoot_all(address, Path(folder), names, dark)


if __name__ == "__main__":
    main(*sys.argv[1:])
