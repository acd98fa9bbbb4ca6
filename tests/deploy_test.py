"""The Dockerfile and the files of deploy/: against schemas, against the programs' flags, and against each other."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from absl import flags
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format, wrappers_pb2
from helpers import PROJECT, ROOT, TEXT, log_rows, mentions, program, run_program, tasks_of_srun
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import txl_tf

DEPLOY = ROOT / "deploy"
PAGE = (DEPLOY / "README.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
MANIFESTS = [(path.name, found) for path in DEPLOY.glob("*.yaml") for found in yaml.safe_load_all(path.read_text())]
SCRIPTS = sorted(DEPLOY.glob("*.sbatch"))
OBJECTS = {(file, found["kind"]): found for file, found in MANIFESTS}
MOUNTED = "/mnt/txl"

# The fields of a RayJob that KubeRay 1.7 knows; there is no package that has its schema.
RAY_JOB = (
    "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint entrypointNumCpus "
    "entrypointNumGpus entrypointResources jobId managedBy metadata preRunningDeadlineSeconds rayClusterSpec "
    "runtimeEnvYAML shutdownAfterJobFinishes submissionMode submitterConfig submitterPodTemplate suspend "
    "ttlSecondsAfterFinished"
)
RAY_CLUSTER = (
    "authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec rayVersion "
    "headServiceAnnotations managedBy suspend upgradeStrategy workerGroupSpecs"
)
RAY_GROUP = "labels rayStartParams resources template"
RAY_WORKERS = f"{RAY_GROUP} groupName idleTimeoutSeconds maxReplicas minReplicas numOfHosts replicas scaleStrategy"


def ray_groups(job):
    """The head and the groups of workers of a RayJob."""
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def templates(found):
    """The templates of an object's pods."""
    if found["kind"] == "RayJob":
        return [group["template"] for group in ray_groups(found)]
    return [found["spec"]["template"]] if "template" in found.get("spec", {}) else []


PODS = [(file, found, template["spec"]) for file, found in MANIFESTS for template in templates(found)]


def containers():
    for file, _, pod in PODS:
        for container in pod["containers"]:
            yield file, pod, container


# -------------------------------------------------------------------------------------------------- commands


def commands_of(text):
    """The commands in a script or in comments that are programs of this library: lists of words."""
    text = re.sub(r"^# +", "", text, flags=re.M).replace("\\\n", " ").replace('"$SLURM_JOB_NUM_NODES"', "4")
    text = re.sub(r'"\$SLURM_CPUS_PER_TASK"', "16", text)
    for found in re.findall(r"(?<![\w/`-])txl-[a-z-]+ [^\n]*--[^\n&]*", text):
        yield shlex.split(found)


def commands():
    """`[(file, words)]` of every command of the Dockerfile, the manifests and the scripts."""
    found = [("Dockerfile", words) for words in commands_of(DOCKERFILE)]
    for path in SCRIPTS:
        found += [(path.name, words) for words in commands_of(path.read_text())]
    found += [(file, shlex.split(job["spec"]["entrypoint"])) for file, job in MANIFESTS if job["kind"] == "RayJob"]
    return found + [(file, c["command"] + c["args"]) for file, _, c in containers() if "command" in c]


COMMANDS = commands()


@pytest.mark.parametrize("file, words", COMMANDS, ids=[file for file, _ in COMMANDS])
def test_a_program_takes_the_flags_of_its_command(file, words):
    name, *arguments = [word.replace("=/txl_tf/", f"={ROOT}/") for word in words]
    with contextlib.closing(program(name)) as loaded:
        next(loaded)
        assert flags.FLAGS([name, *arguments]) == [name]


def flag(file, name):
    """The value of a flag in the only command of a file."""
    ((_, words),) = (command for command in COMMANDS if command[0] == file)
    (value,) = (word.partition("=")[2] for word in words if word.startswith(f"--{name}="))
    return value


def test_every_program_that_is_deployed_has_a_command():
    assert sorted(file for file, _ in COMMANDS) == sorted(
        ["Dockerfile", "export.yaml", "kuberay-prepare.yaml", "kuberay-train.yaml", *(path.name for path in SCRIPTS)]
    )


def test_what_one_file_writes_the_next_one_reads():
    assert flag("kuberay-train.yaml", "data_dir") == flag("kuberay-prepare.yaml", "data_dir")
    assert flag("export.yaml", "model_dir") == flag("kuberay-train.yaml", "model_dir")
    assert flag("slurm-ray.sbatch", "data_dir") == flag("slurm-train.sbatch", "data_dir")
    for file, words in COMMANDS:
        if file.endswith(".yaml"):
            paths = [word.partition("=")[2] for word in words if "=/" in word]
            assert paths and all(path.startswith(f"{MOUNTED}/") for path in paths)


# ------------------------------------------------------------------------------------------------- manifests


def test_manifests_fit_the_schemas_of_kubernetes():
    reason = "kubernetes-validate, which has the schemas of Kubernetes in 108 MB, is not installed"
    schemas = pytest.importorskip("kubernetes_validate", reason=reason)
    for _, found in MANIFESTS:
        if found["kind"] != "RayJob":
            schemas.validate(found, schemas.latest_version(), strict=True)
            continue
        for template in templates(found):
            pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pods"}, "template": template}
            schemas.validate(pods, schemas.latest_version(), strict=True)


def test_strangers_reach_no_pod_of_ray_but_for_the_dashboard():
    policy = OBJECTS["network.yaml", "NetworkPolicy"]["spec"]
    ray = {"matchLabels": {"ray.io/is-ray-node": "yes"}}
    assert policy["podSelector"] == ray and policy["policyTypes"] == ["Ingress"]
    inside, dashboard = policy["ingress"]
    assert inside == {"from": [{"podSelector": ray}]}
    assert [port["port"] for port in dashboard["ports"]] == [8265]
    assert "kubectl apply -f deploy/network.yaml" in PAGE


def test_every_command_that_starts_ray_has_a_token():
    for path in [*DEPLOY.glob("*.sbatch"), ROOT / "docs/scale.md"]:
        text = path.read_text()
        starts = [at.start() for at in re.finditer(r"^[^`\n]*\bray start\b", text, re.M)]
        assert all("RAY_AUTH_MODE=token" in text[: at + 20] for at in starts), path


@pytest.mark.parametrize("file", ["kuberay-prepare.yaml", "kuberay-train.yaml"])
def test_a_ray_job_has_fields_that_kuberay_knows(file):
    job = OBJECTS[file, "RayJob"]
    cluster = job["spec"]["rayClusterSpec"]
    assert job["apiVersion"] == "ray.io/v1" and set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(job["spec"]) <= set(RAY_JOB.split()) and set(cluster) <= set(RAY_CLUSTER.split())
    head, workers = ray_groups(job)
    assert set(head) <= set(RAY_GROUP.split()) and set(workers) <= set(RAY_WORKERS.split())
    assert head["rayStartParams"] == {"num-cpus": "0"} and workers["rayStartParams"] == {}
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]


def test_a_training_has_a_pod_for_each_worker_and_its_processors():
    _, workers = ray_groups(OBJECTS["kuberay-train.yaml", "RayJob"])
    (container,) = workers["template"]["spec"]["containers"]
    assert workers["replicas"] == int(flag("kuberay-train.yaml", "ray_workers"))
    assert container["resources"]["limits"]["cpu"] == flag("kuberay-train.yaml", "ray_cpus")


def test_volumes_and_ports_that_are_named_exist():
    names = {(found["kind"], found["metadata"]["name"]) for _, found in MANIFESTS}
    for _, pod, container in containers():
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert MOUNTED in {mount["mountPath"] for mount in container["volumeMounts"]}
        for volume in pod["volumes"]:
            claim, config = volume.get("persistentVolumeClaim"), volume.get("configMap")
            named = ("PersistentVolumeClaim", claim["claimName"]) if claim else ("ConfigMap", config["name"])
            assert named in names
    deployment, service = OBJECTS["serving.yaml", "Deployment"]["spec"], OBJECTS["serving.yaml", "Service"]["spec"]
    (server,) = deployment["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports == {"grpc": 8500, "rest": 8501}
    assert server["readinessProbe"]["httpGet"]["port"] in ports
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels


# --------------------------------------------------------------------------------------------------- serving


def batching_parameters():
    """TensorFlow Serving's message of this name, of which tensorflow-serving-api has no module."""
    file = descriptor_pb2.FileDescriptorProto(name="batching.proto", package="serving", syntax="proto3")
    file.dependency.append("google/protobuf/wrappers.proto")
    message = file.message_type.add(name="BatchingParameters")
    kinds = descriptor_pb2.FieldDescriptorProto
    names = "max_batch_size batch_timeout_micros max_enqueued_batches num_batch_threads"
    for number, name in enumerate(names.split(), 1):
        wrapped = {"type": kinds.TYPE_MESSAGE, "type_name": ".google.protobuf.Int64Value"}
        message.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL, **wrapped)
    message.field.add(name="allowed_batch_sizes", number=6, label=kinds.LABEL_REPEATED, type=kinds.TYPE_INT64)
    message.field.add(name="pad_variable_length_inputs", number=7, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_BOOL)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("serving.BatchingParameters"))()


def test_the_server_s_files_are_what_it_reads():
    reason = "tensorflow-serving-api is not installed"
    servers = pytest.importorskip("tensorflow_serving.config.model_server_config_pb2", reason=reason)
    files = OBJECTS["serving.yaml", "ConfigMap"]["data"]
    ((server, pod),) = ((c, pod) for file, pod, c in containers() if file == "serving.yaml")
    (folder,) = (mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] == "config")
    named = re.findall(rf"- --\w+_file={folder}/(\S+)", (DEPLOY / "serving.yaml").read_text())
    assert sorted(named) == sorted(files) == ["batching.config", "models.config"]
    (model,) = text_format.Parse(files["models.config"], servers.ModelServerConfig()).model_config_list.config
    assert model.base_path == flag("export.yaml", "output") and model.base_path.endswith(f"/{model.name}")
    assert server["readinessProbe"]["httpGet"]["path"] == f"/v1/models/{model.name}"
    batching = text_format.Parse(files["batching.config"], batching_parameters())
    assert batching.max_batch_size.value == int(flag("export.yaml", "max_rows"))
    assert batching.num_batch_threads.value == int(server["resources"]["limits"]["cpu"])


# ------------------------------------------------------------------------------------ versions and the image


def requirements(extra=None):
    """What pyproject.toml installs, or an extra of it."""
    names = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return {made.name: made for made in map(Requirement, names)}


def test_images_are_built_with_extras_that_exist_and_have_the_versions_of_the_project():
    builds = re.findall(r"^docker build -t (\S+) --build-arg EXTRAS=(\S+) \.$", PAGE, re.M)
    ((image, extras),) = builds
    assert f"docker push {image}\n" in PAGE
    assert {c["image"] for _, _, c in containers()} == {image, "tensorflow/serving:2.21.0"}
    needed = {name: made for extra in extras.split(",") for name, made in requirements(extra).items()}
    assert needed["ray"].extras >= {"data", "train", "default"}  # KubeRay asks Ray's dashboard, which is in "default"
    for _, job in MANIFESTS:
        if job["kind"] == "RayJob":
            assert needed["ray"].specifier.contains(job["spec"]["rayClusterSpec"]["rayVersion"])
    assert requirements()["tensorflow"].specifier.contains("2.21.0")


def test_the_image_is_installed_as_the_readme_says():
    """With extras, and without pip's cache in the image."""
    readme = (ROOT / "README.md").read_text()
    (installs,) = re.findall(r"^python3 -m venv .*?pip (install .*?) && \S+ train.py", readme, re.M)
    (image,) = re.findall(r"^RUN cd /txl_tf && pip (install .*)$", DOCKERFILE, re.M)
    assert image.replace(" --no-cache-dir", "").replace('".${EXTRAS:+[$EXTRAS]}"', ".") == installs
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim$", DOCKERFILE, re.M)
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{python}.0")
    assert re.search(r"^USER [1-9]\d*$", DOCKERFILE, re.M)  # a number: Kubernetes sees that it is not root


def test_what_comes_into_the_image_is_what_the_installation_needs_and_the_programs():
    first, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    names = {line.removeprefix("!") for line in kept if line.startswith("!")}
    assert first == "*" and "**/__pycache__" in kept
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    left_out = {path.split("/")[0] for path in tracked} - names
    assert names <= {path.split("/")[0] for path in tracked}
    assert left_out <= {
        ".ci", ".dockerignore", ".github", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff",
        "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "Dockerfile", "README.zh.md", "SECURITY.md",
        "deploy", "docs", "mkdocs.yml", "noxfile.py", "pyrightconfig.strict.json", "tests",
    }  # fmt: skip
    assert names >= {"pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]}


def test_the_page_has_every_file():
    for path in DEPLOY.iterdir():
        assert path.name == "README.md" or f"deploy/{path.name}" in PAGE, path.name
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (DEPLOY / target).exists(), target


# ---------------------------------------------------------------------------------------------------- Slurm

# Programs that stand for others, in a folder that comes first on PATH.
SRUN = """#!/bin/bash
# Starts its command once for every file of variables in tasks/, as srun would.
while [[ $1 == --* ]]; do shift; done
for variables in tasks/*; do (set -a; source "$variables"; exec "$@") & started+=($!); done
for task in "${started[@]}"; do wait "$task" || exit; done
"""
NOTED = """#!/bin/bash
echo "$(basename "$0") $*" >> calls
"""
SMALL_TRAINING = f"""#!/bin/bash
exec "{sys.executable}" "{ROOT}/train.py" "$@" --preset=tiny \\
    --n_layer=1 --d_model=8 --d_embed=8 --n_head=2 --d_head=4 --d_inner=8 --tgt_len=8 --mem_len=8 \\
    --train_batch_size=4 --eval_batch_size=2 --train_steps=6 --iterations=2 --save_steps=3 --warmup_steps=1
"""
SAVING = """#!/bin/bash
echo "$(basename "$0") $*" >> calls
trap 'echo saved >> calls; exit 0' TERM
touch training
while true; do sleep 0.05; done
"""


def place(folder, **programs):
    """Writes programs, by their names with _ for -, into the .venv that a script activates."""
    venv = folder / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f'PATH="{venv}:$PATH"\n')
    for name, code in programs.items():
        path = venv / name.replace("_", "-")
        path.write_text(code)
        path.chmod(0o755)


def options(path):
    """The `#SBATCH` options of a script."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(), re.M))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one_that_bash_and_slurm_read(path):
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0 and path.read_text().startswith("#!/bin/bash\n"), checked.stderr
    asked = options(path)
    assert len(asked) == len(re.findall("^#SBATCH", path.read_text(), re.M))
    assert asked["ntasks-per-node"] == "1" and asked["open-mode"] == "append" and "requeue" in asked


def test_the_batches_that_the_script_for_slurm_suggests_are_multiples_of_its_gpus():
    text = (DEPLOY / "slurm-train.sbatch").read_text()
    (nodes,), (gpus,) = (re.findall(rf"SBATCH --{name}=(\d+)", text) for name in ("nodes", "gpus-per-node"))
    sizes = re.findall(r"--(\w+_batch_size)=(\d+)", text)
    assert {name for name, _ in sizes} == {"train_batch_size", "eval_batch_size"}
    assert not any(int(size) % (int(nodes) * int(gpus)) for _, size in sizes)


@pytest.mark.slow
def test_the_script_for_slurm_trains_with_two_tasks_as_one_device_does(tmp_path):
    place(tmp_path, srun=SRUN, txl_train=SMALL_TRAINING)
    (tmp_path / "text.txt").write_text(TEXT)
    prepare = ["tools/prepare_data.py", "--dataset=text", "--data_path=text.txt", "--data_dir=data/corpus"]
    assert run_program(*prepare, cwd=tmp_path).returncode == 0
    (tmp_path / "tasks").mkdir()
    for i, variables in enumerate(tasks_of_srun(2)):
        (tmp_path / "tasks" / str(i)).write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    environment = {**os.environ, "SLURM_CPUS_PER_TASK": "1"}
    started = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(["bash", str(DEPLOY / "slurm-train.sbatch")], **started)
    assert done.returncode == 0 and mentions(done.stdout, 2, "workers"), (done.stdout, done.stderr)
    assert done.stdout.count("2 replicas") == 1  # one of the two logs
    alone = [str(tmp_path / ".venv/bin/txl-train"), "--data_dir=data/corpus", "--model_dir=runs/alone"]
    assert subprocess.run(alone, **started).returncode == 0
    rows, expected = (log_rows(tmp_path / "runs" / name) for name in ("lm", "alone"))
    assert [row["step"] for row in rows] == ["2", "4", "6"]
    for name in ("step", "loss", "grad_norm", "val_loss"):
        found, wanted = ([float(row[name].replace("NA", "nan")) for row in table] for table in (rows, expected))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=name)
    models = [txl_tf.load_run(str(tmp_path / "runs" / name))[0] for name in ("lm", "alone")]
    for found, wanted in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_the_script_for_ray_starts_it_on_every_node_and_hands_on_that_the_time_is_over(tmp_path):
    place(tmp_path, ray=NOTED, srun=NOTED, txl_train=SAVING)
    variables = {"SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "8", "SLURMD_NODENAME": "n1"}
    command = ["bash", str(DEPLOY / "slurm-ray.sbatch")]
    script = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **variables})
    deadline = time.monotonic() + 60
    while not (tmp_path / "training").exists() or "srun " not in (tmp_path / "calls").read_text():
        assert script.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=30) == 0
    token, head, *others, saved = (tmp_path / "calls").read_text().splitlines()
    assert token == "ray get-auth-token --generate"
    assert head == "ray start --head --port=6379 --num-cpus=8" and saved == "saved"
    worker, training = sorted(others)
    start = "ray start --block --address=n1:6379 --num-cpus=8"
    assert worker == f"srun --no-kill --nodes=2 --ntasks=2 --exclude=n1 --cpus-per-task=8 {start}"
    assert training.endswith("--ray_address=n1:6379 --ray_workers=3 --ray_cpus=8 --ray_restarts=10")
