"""All examples work as described."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import horovods
import pytest
from launching import LAUNCHER, LIMIT, needs_torch, running, until

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TRAINING = [sys.executable, str(EXAMPLES / "digits_horovod.py"), "--epochs", "4", "--batch", "48"]
HOROVODS_TESTS = {
    "test_torch.py": "f7897ae830048c16468112316538a5ad8f9bed3418d71a5a5726e21be69c97ff",
    "test_stall.py": "ccaf77bb3eadb15b1756e5cac5ec477aec3d8795bb5ea626d8bfb448b13ee5c5",
}
# Expectations of those tests, and why Gradwire differs.
DIFFERENT = {
    "test_horovod_allgather_grad": "the sum of the ranks' gradients; the average since 0.20",
    "test_horovod_broadcast_grad": "the sum of the ranks' gradients; the average since 0.20",
    "test_broadcast_state_no_grad": "zero gradients before a backward pass; here there are none",
    "test_dynamic_requires_grad": "zero gradients after zero_grad(); none since PyTorch 2.0",
    "test_synchronize_step_warning": "a warning of a second exchange; here there is none",
    "test_horovod_join_allreduce": "an average over all ranks; here without those that have joined",
    "test_horovod_join_allgather": "an error; here allgather works with join",
    "test_horovod_join_broadcast": "an error; here broadcast works with join",
    "test_horovod_allreduce_async_fused": "poll() is false at first; there are no cycles here",
    "test_horovod_allgather_async_fused": "poll() is false at first; there are no cycles here",
}


def run(words: list[str], **variables: str) -> str:
    done = subprocess.run(
        words,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(said: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss ([0-9.]+)", said)]


def accuracy(said: str) -> float:
    return float(re.findall(r"accuracy ([0-9.]+)", said)[0])


@pytest.fixture(scope="module")
def alone() -> str:
    """What the training says on a single rank."""
    pytest.importorskip("torch")
    return run(TRAINING)


def on_three(*flags: str) -> str:
    """What the training says on three ranks, which must have the same bits (SAME)."""
    said = run([LAUNCHER, "run", "-H", "127.0.0.1:2,127.0.0.2:1", *flags, "--", *TRAINING])
    assert "the same bits on 3 of 3 ranks" in said, said
    return said


def test_digits_train_alike_on_1_and_3_ranks(alone: str) -> None:
    three = on_three()
    assert len(losses(alone)) == len(losses(three)) == 4, (alone, three)
    # The parts of three ranks form the same batches, so the training is the same.
    assert losses(alone) == pytest.approx(losses(three), abs=1e-5), (alone, three)
    assert losses(alone)[3] < losses(alone)[0] / 2, alone
    assert min(accuracy(alone), accuracy(three)) > 0.8, (alone, three)


@pytest.mark.parametrize("compression", ["int8", "fp8"])
def test_digits_are_as_accurate_in_eight_bits(compression: str, alone: str) -> None:
    said = on_three("--set", f"data.compression={compression}")
    assert losses(said)[1:] != losses(alone)[1:], "most of the parameters are in one large tensor"
    assert losses(said) == pytest.approx(losses(alone), rel=0.1, abs=0.02), (said, alone)
    assert accuracy(said) >= accuracy(alone) - 0.02, (said, alone)


def test_digits_with_the_hook_of_ddp() -> None:
    """With any PyTorch; `test_examples_of_groups.py` has all styles with the newest one."""
    pytest.importorskip("torch")
    program = [sys.executable, str(EXAMPLES / "digits_ddp.py"), "--epochs", "5", "--hook"]
    said = run([LAUNCHER, "run", "-H", "127.0.0.1:1,127.0.0.2:1", "--", *program])
    assert len(losses(said)) == 5 and losses(said)[4] < losses(said)[0] / 2, said
    assert accuracy(said) > 0.7, said


def test_commands_to_survive_a_kill(tmp_path: Path) -> None:
    """Runs the five commands of docs/elastic.md with a Horovod script."""
    pytest.importorskip("torch")
    guide = (EXAMPLES.parent / "docs" / "elastic.md").read_text()
    # The first line has the words of the block.
    edit, start, look, kill, end = guide.split("```")[1].strip().splitlines()[1:]
    folder = tmp_path / "examples"
    folder.mkdir()
    (tmp_path / "python").symlink_to(EXAMPLES.parent / "python")
    for module in ("digits_arguments.py", "digits_data.py"):
        (folder / module).symlink_to(EXAMPLES / module)
    text = (EXAMPLES / "digits_elastic.py").read_text()
    script = text.replace("import gradwire.torch as hvd", "import horovod.torch as hvd")
    (folder / "train.py").write_text(script)
    subprocess.run(["bash", "-c", edit], cwd=folder, check=True)
    assert (folder / "train.py").read_text() == text
    output = folder / "output"
    output.touch()
    assert start.endswith("python train.py > output 2>&1 &") and look.endswith("cat output")
    folders = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = subprocess.Popen(
        ["bash", "-c", f"exec {start.removesuffix(' &')}"],
        cwd=folder,
        env={**os.environ, "PATH": folders, "PYTHONUNBUFFERED": "1"},
    )
    try:
        of_rank = r"rank 1 of 3, process (\d+)"
        until("rank 1 trains", lambda: "epoch 1:" in output.read_text(), LIMIT)
        process = re.findall(of_rank, output.read_text())[0]
        assert kill.startswith("kill -9 PID") and end.startswith("wait")
        subprocess.run(["bash", "-c", kill.replace("PID", process)], check=True)
        assert job.wait(LIMIT) == 0, output.read_text()
    finally:
        job.terminate()
        job.wait()
    said = output.read_text()
    assert f"process {process}" in said and "killed by SIGKILL" in said, said
    results = re.findall(r"rank \d of (\d): accuracy ([0-9.]+), parameters (\w+)", said)
    assert len(results) == int(results[0][0]) and len(set(results)) == 1, said
    assert float(results[0][1]) > 0.8, said


def test_digits_skip_the_step_of_a_killed_rank(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = [LAUNCHER, "run", "-np", "3", "--min-np", "2", "--blacklist-cooldown-range", "600"]
    words += ["600", "--", sys.executable, "-u", str(EXAMPLES / "digits_elastic.py"), "--skip"]
    log = tmp_path / "log"
    with running(words, log) as job:
        until("the first epoch ends", lambda: "epoch 1:" in log.read_text(), LIMIT)
        process = re.findall(r"rank 1 of 3, process (\d+)", log.read_text())[0]
        os.kill(int(process), signal.SIGKILL)
        assert job.wait(LIMIT) == 0, log.read_text()
    said = log.read_text()
    results = re.findall(r"rank \d of 2: accuracy ([0-9.]+), parameters (\w+)", said)
    assert len(results) == 2 and results[0] == results[1], said
    assert float(results[0][0]) > 0.8, said


def test_invalid_arguments() -> None:
    pytest.importorskip("torch")
    words = [sys.executable, str(EXAMPLES / "digits_horovod.py"), "--batch", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2 and "--batch: invalid positive value: '0'" in done.stderr, (
        done.stderr
    )


def test_a_function_as_a_job() -> None:
    said = run([sys.executable, str(EXAMPLES / "function_as_job.py")])
    numbers = [float(text) for text in re.findall(r"3\.\d+", said)]
    assert len(numbers) == 4 and len(set(numbers)) == 1 and abs(numbers[0] - 3.14) < 0.02, said


@pytest.fixture(scope="module")
def horovods_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return horovods.tests_in(tmp_path_factory.mktemp("horovod"), HOROVODS_TESTS)


def test_horovods_own_tests(horovods_tests: Path) -> None:
    """Runs a script of 1,730 lines by Horovod's authors, with only its import changed."""
    needs_torch(2, 3, why="it makes tensors of options of optimizers that are None there")
    script = horovods_tests / "test_torch.py"
    tests = re.findall(r"def (test_\w+)", script.read_text())
    assert len(tests) == 47 and DIFFERENT.keys() <= set(tests)
    chosen = [f"TorchTests.{test}" for test in tests if test not in DIFFERENT]
    words = [sys.executable, str(EXAMPLES / "real_horovod.py"), str(script), *chosen]
    said = run(words, **horovods.VARIABLES)
    assert said.startswith(
        "line 36: import horovod.torch as hvd  ->  import gradwire.torch as hvd\n"
    ), said
    assert len(re.findall(rf"Ran {len(chosen)} tests", said)) == 2, said


def test_horovods_own_test_of_stalls(horovods_tests: Path) -> None:
    """Rank 1 comes ten seconds late, which is reported, but not an error."""
    script = horovods_tests / "test_stall.py"
    said = run([sys.executable, str(EXAMPLES / "real_horovod.py"), str(script)])
    assert "tensor 'allreduce.#1' has waited " in said and " for rank 1 on host" in said, said
    assert "rank 1" in said and "test_stall.py:19 in test" in said, said


def test_horovods_own_example(tmp_path: Path) -> None:
    folder = os.environ.get("HOROVOD_EXAMPLES")
    if folder is None:
        pytest.skip(
            "HOROVOD_EXAMPLES does not name the folder examples/pytorch of Horovod's sources"
        )
    pytest.importorskip("torchvision")
    words = [
        sys.executable,
        str(EXAMPLES / "real_horovod.py"),
        f"{folder}/pytorch_synthetic_benchmark.py",
    ]
    words += ["--model", "resnet18", "--batch-size", "2", "--no-cuda"]
    words += ["--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2"]
    for flags in [[], ["--fp16-allreduce"], ["--use-adasum"]]:
        said = run(words + flags, OMP_NUM_THREADS="1")
        assert said.count("  ->  ") == 1 and "Total img/sec on 2 CPU(s)" in said, said
