"""TensorFlow and Keras over Gradwire, on jobs of one to four ranks.

Tests are skipped where TensorFlow is not installed; ``make frameworks`` installs it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import horovods
import pytest
from launching import LAUNCHER, LIMIT, Job, at_night, jobs_of

HOROVODS_TESTS = {
    "test_tensorflow.py": "507e1eb383ccbc9b2a0e3ac8d11ac48d1d97d17e42b8377c893d6e2fdaf2163c",
}
# Expectations of those tests, and why Gradwire differs.
_GRADIENT = "the sum of the ranks' gradients; the average since 0.20"
DIFFERENT = {
    "test_horovod_allgather_grad_cpu": _GRADIENT,
    "test_horovod_broadcast_grad_cpu": _GRADIENT,
}
HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent.parent / "examples"
JOBS = jobs_of("127.0.0.1:1,127.0.0.2:1")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        env={**os.environ, **QUIET, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * LIMIT,
    )


@pytest.mark.parametrize("hosts", JOBS)
def test_on_the_ranks_of(hosts: str) -> None:
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["-W", "ignore::DeprecationWarning"]
    words += [str(HERE / "tensorflow_ranks"), str(HERE / "keras_ranks")]
    if hosts:
        words = [LAUNCHER, "run", "-H", hosts, "--", *words]
    done = run(words, GWTEST_RANK="1")
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "passed" in done.stdout or "[100%]" in done.stdout


@at_night
def test_keras_on_the_backend_torch() -> None:
    words = [LAUNCHER, "run", "-H", "127.0.0.1:1,127.0.0.2:1", "--", sys.executable, "-m", "pytest"]
    words += ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / "keras_ranks")]
    done = run(words, GWTEST_RANK="1", KERAS_BACKEND="torch")
    assert done.returncode == 0, done.stdout[-20_000:]


def test_one_thread_and_other_orders(job: Job) -> None:
    """Ranks start the same gradients in different orders, and have one thread for it."""
    done = job(
        """
        import random
        import tensorflow as tf
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        import gradwire.tensorflow as hvd
        from gradwire.tensorflow import _gradients

        hvd.init()
        _gradients._BUCKET_BYTES = 1  # a bucket for each gradient
        variables = [tf.Variable(tf.ones([at + 1]), name=f"v{at}") for at in range(30)]
        orders = list(range(30))
        random.Random(hvd.rank()).shuffle(orders)

        @tf.function
        def step(by):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v) * by * float(at) for at, v in
                                 enumerate(variables)])
            own = [variables[at] for at in orders]
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
            return tape.gradient(loss, own)

        for number in range(20):
            for at, found in zip(orders, step(tf.constant(float(hvd.rank() + 1)))):
                assert float(found[0]) == at * sum(range(1, hvd.size() + 1)), (at, found)
        print("ALL", hvd.rank())
        """,
        ranks=4,
        **QUIET,
    )
    assert done.returncode == 0 and done.stdout.count("ALL") == 4, done.stdout


def test_a_mismatch_in_a_compiled_function(job: Job) -> None:
    done = job(
        """
        import tensorflow as tf
        import gradwire.tensorflow as hvd

        hvd.init()

        @tf.function
        def step(x):
            return hvd.allreduce(x, name="gradient") + 1

        step(tf.ones([3]))
        try:
            step(tf.ones([3 + hvd.rank()]))
        except hvd.Disagreement as error:
            print("TOLD", hvd.rank(), error.kind, "allreduce.gradient" in str(error))
        """,
        ranks=3,
        **QUIET,
    )
    assert len(re.findall(r"TOLD \d disagreement True", done.stdout)) == 3, done.stdout


@pytest.mark.parametrize("where", ["function", pytest.param("fit", marks=at_night)])
def test_a_rank_killed_in_a_compiled_step(job: Job, where: str) -> None:
    done = job(
        """
        import os, signal, sys
        import numpy as np
        import keras, tensorflow as tf
        import gradwire.keras
        import gradwire.tensorflow as hvd

        hvd.init()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

        def die():
            if hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        @tf.function
        def step(x):
            return hvd.allreduce(x, name="gradient")

        def train():
            if os.environ["WHERE"] == "function":
                step(tf.ones([3]))
                die()
                step(tf.ones([3]))
            else:
                model.compile(gradwire.keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
                killer = keras.callbacks.LambdaCallback(
                    on_train_batch_begin=lambda at, **_: die() if at == 3 else None)
                x = np.ones((80, 4), "f4")
                model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[killer])

        try:
            train()
        except hvd.PeerLost as error:
            print(f"LOST rank {error.rank} says {hvd.rank()}: {error}", flush=True)
            raise
        """,
        ranks=3,
        WHERE=where,
        **QUIET,
    )
    assert done.returncode == 137, done.stdout
    for rank in (0, 2):
        text = rf"LOST rank 1 says {rank}: .*rank 1 on host .* was killed by SIGKILL"
        assert re.search(text, done.stdout), done.stdout


ELASTIC = """
import os, signal, sys, time
from pathlib import Path
import keras
import numpy as np

import gradwire.keras as hvd

hvd.init()
mark = Path(os.environ["TEST_FOLDER"]) / "killed"
keras.utils.set_random_seed(hvd.rank())
given = np.random.default_rng(0).normal(size=(400, 4)).astype("f4")
inner = keras.layers.Dense(3, activation="tanh")
model = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")


def begin(batch, logs=None):
    if (state.epoch, state.batch, hvd.rank()) == (1, 4, 1) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.size() < 3:
        time.sleep(0.1)  # until the next rank has come


@hvd.elastic.run
def train(state):
    print("TRAIN", hvd.rank(), hvd.size(), state.epoch, state.batch, flush=True)
    while state.epoch < 3 or state.batch > 0 or hvd.size() < 3:
        callbacks = [
            keras.callbacks.LambdaCallback(on_train_batch_begin=begin),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ]
        model.fit(given, given[:, :1], batch_size=40, verbose=0, epochs=1, callbacks=callbacks)


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state)
steps = int(model.optimizer.iterations)
total = sum(abs(keras.ops.convert_to_numpy(each)).sum(dtype="f8") for each in model.weights)
print(f"END {hvd.rank()} {steps - 10 * state.epoch} {total!r}", flush=True)
"""


@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=at_night)])
def test_fit_outlives_a_killed_rank(job: Job, backend: str) -> None:
    options = ["--min-np", "2", "--blacklist-cooldown-range", "1", "1"]
    done = job(ELASTIC, ranks=3, options=options, KERAS_BACKEND=backend, **QUIET)
    assert done.returncode == 0, done.stdout
    assert re.search(r"TRAIN \d 2 1 4$", done.stdout, re.MULTILINE), done.stdout
    ends = re.findall(r"END \d (-?\d+) (\S+)", done.stdout)
    assert len(ends) == 3 and len(set(ends)) == 1, done.stdout
    assert ends[0][0] == "0", "no step is made twice, and none is missing"


def test_a_compiled_step_outlives_a_killed_rank(job: Job) -> None:
    done = job(
        """
        import os, signal
        import tensorflow as tf
        import gradwire.tensorflow as hvd

        hvd.init()
        weights = tf.Variable(tf.fill([5], float(hvd.rank() + 1)))

        @tf.function
        def step(by):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights * by)
            weights.assign_sub(hvd.DistributedGradientTape(tape).gradient(loss, weights))

        @hvd.elastic.run
        def train(state):
            while state.step < 12:
                if state.step == 7 and hvd.size() == 3 and hvd.rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                step(tf.constant(2.0))
                state.step += 1
                if state.step % 4 == 0:
                    state.commit()

        state = hvd.elastic.TensorFlowState([weights], step=0)
        train(state)
        print("END", hvd.size(), state.step, set(weights.numpy().tolist()), flush=True)
        """,
        ranks=3,
        options=["--min-np", "2", "--blacklist-cooldown-range", "600", "600"],
        **QUIET,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("END 2 12 {-23.0}") == 2, done.stdout


def test_horovods_own_tests(tmp_path: Path) -> None:
    script = horovods.tests_in(tmp_path, HOROVODS_TESTS) / "test_tensorflow.py"
    tests = re.findall(r"    def (test_\w+)", script.read_text())
    assert len(tests) == 30 and DIFFERENT.keys() <= set(tests)
    chosen = [f"MPITests.{test}" for test in tests if test not in DIFFERENT]
    words = [sys.executable, str(EXAMPLES / "real_horovod.py"), str(script), *chosen]
    done = run(words, **horovods.VARIABLES)
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "import horovod.tensorflow as hvd  ->  import gradwire.tensorflow as hvd" in done.stdout
    assert done.stdout.count(f"Ran {len(chosen)} tests") == 2, done.stdout
    # The tests for GPUs, for other communicators, and for sessions of TensorFlow 1.
    assert done.stdout.count("OK (skipped=") == 2, done.stdout


@pytest.mark.parametrize("version", ["2.15.0", "3.9.2"])
def test_an_old_keras_is_refused(version: str) -> None:
    text = f"""
import sys
import keras
keras.__version__ = "{version}"
sys.modules["keras.src.api_export"] = None  # Keras 2 has none
import gradwire.tensorflow
"""
    done = run([sys.executable, "-c", text])
    told = f"ImportError: gradwire.keras needs Keras 3.10 or newer, and this is {version}: "
    assert done.stdout.splitlines()[-1].startswith(told), done.stdout


def losses(said: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss:? ([0-9.]+)", said)]


@pytest.mark.parametrize("example", ["digits_tensorflow.py", "digits_keras.py"])
def test_examples_train_as_one_process(example: str) -> None:
    program = [sys.executable, str(EXAMPLES / example), "--epochs", "3", "--batch", "48"]
    alone = run(program)
    assert alone.returncode == 0, alone.stdout
    found = run([LAUNCHER, "run", "-np", "2", "--", *program])
    assert found.returncode == 0, found.stdout
    assert len(losses(alone.stdout)) >= 3
    assert losses(found.stdout) == pytest.approx(losses(alone.stdout), rel=0.02)
    assert "the same bits on 2 of 2 ranks" in found.stdout
