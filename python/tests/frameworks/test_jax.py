"""``gradwire.jax``: its calls on ranks, and how compiled programs fail.

``python/make_frameworks.py`` names the tested versions. Without JAX, all tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import AT_NIGHT, LAUNCHER, LIMIT, Job, jobs_of

jax = pytest.importorskip("jax")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
# At night also a single process without a launcher.
JOBS = jobs_of("127.0.0.1:2,127.0.0.2:1", *([""] if AT_NIGHT else []))


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command and returns its output."""
    return subprocess.run(
        words,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * LIMIT,
    )


@pytest.mark.parametrize("hosts", JOBS)
def test_on_the_ranks_of(hosts: str) -> None:
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    words += ["-W", "ignore::DeprecationWarning", str(HERE / "jax_ranks.py")]
    if hosts:
        ranks = sum(int(host.partition(":")[2]) for host in hosts.split(","))
        words = [LAUNCHER, "run", "-np", str(ranks), "-H", hosts, "--", *words]
    done = run(words, GWTEST_RANK="1")
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "passed" in done.stdout or "[100%]" in done.stdout


def test_keras_on_the_backend_jax() -> None:
    pytest.importorskip("keras")
    words = [LAUNCHER, "run", "-H", "127.0.0.1:1,127.0.0.2:1", "--", sys.executable, "-m", "pytest"]
    words += ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / "keras_ranks")]
    done = run(words, GWTEST_RANK="1", KERAS_BACKEND="jax")
    assert done.returncode == 0, done.stdout[-20_000:]


def test_ranks_that_disagree_all_fail(job: Job) -> None:
    done = job("""
        import jax
        import jax.numpy as jnp
        import gradwire.jax as gw

        gw.init()

        @jax.jit
        def program(x):
            total = gw.allreduce(x, name="x").sum()
            return total + gw.allreduce(total, name="total")

        try:
            program(jnp.ones(3 + gw.rank())).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            own = gw.last_error()
            assert isinstance(own, gw.Disagreement) and str(own) in str(error), error
            assert own.tensor == "allreduce.x" and "[3]" in str(own) and "[4]" in str(own), own
            print("TOLD\\n", end="")
        # The job goes on.
        print(f"SUM {float(program(jnp.ones(2)))}\\n", end="")
    """)
    assert done.returncode == 0 and done.stdout.count("TOLD") == 2, done.stdout
    assert done.stdout.count("SUM 4.0") == 2, done.stdout


def test_rows_that_differ_fail_on_all_ranks(job: Job) -> None:
    done = job("""
        import jax
        import jax.numpy as jnp
        import gradwire.jax as gw

        gw.init()
        try:
            jax.jit(gw.allgather)(jnp.ones((1 + gw.rank(), 2))).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            assert "[1, 2] rows" in str(error), error
            assert isinstance(gw.last_error(), gw.InvalidRequest)
            print("TOLD\\n", end="")
        if gw.rank() == 1:
            gw.abort("enough")
        try:
            gw.barrier()
        except gw.GradwireError as error:
            print(f"ABORTED {error}\\n", end="")
    """)
    assert done.stdout.count("TOLD") == 2, done.stdout
    assert len(re.findall("ABORTED .*enough", done.stdout)) == 2, done.stdout


@pytest.mark.parametrize("place", ["step", "while"])
def test_a_killed_rank_ends_compiled_code(job: Job, place: str) -> None:
    """It is killed before its part of an exchange that the others wait for."""
    done = job(
        """
        import os
        import signal
        import sys
        import jax
        import jax.numpy as jnp
        import gradwire.jax as gw

        gw.init()

        def die(step):
            if gw.rank() == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        def body(step, x):
            jax.debug.callback(die, step)
            return gw.allreduce(x, name="x") + 1

        if os.environ["PLACE"] == "while":
            program = jax.jit(lambda x: jax.lax.fori_loop(0, 100, body, x))
        else:
            program = jax.jit(body)
        try:
            x = jnp.ones(4)
            for step in range(100):
                x = program(x) if os.environ["PLACE"] == "while" else program(step, x)
                x.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            own = gw.last_error()
            assert isinstance(own, gw.PeerLost) and own.rank == 1 and str(own) in str(error)
            print(f"RANK {gw.rank()} TOLD\\n", end="", flush=True)
            raise
        """,
        ranks=3,
        PLACE=place,
    )
    assert done.returncode == 137, done.stdout
    assert all(f"RANK {rank} TOLD" in done.stdout for rank in (0, 2)), done.stdout
    # The report blames the rank that went first, and no other one.
    assert re.search(r"rank 1 on host .* was killed by SIGKILL", done.stdout), done.stdout


def test_memory_and_handles_stay_constant(job: Job) -> None:
    done = job(
        """
        import gc
        import os
        import jax
        import jax.numpy as jnp
        import gradwire.jax as gw

        gw.init()

        @jax.jit
        def program(tree):
            return gw.allreduce(tree, name="tree")

        def resident():
            gc.collect()
            with open("/proc/self/statm") as about:
                return int(about.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        def threads():
            return len(os.listdir("/proc/self/task"))

        tree = {"a": jnp.ones(30_000), "b": jnp.ones(7), "c": jnp.ones((10, 10), jnp.bfloat16)}
        steps = int(os.environ["STEPS"])
        for step in range(steps):
            tree = program(tree)
            if step in (500, steps - 1):
                jax.block_until_ready(tree)
                kept = resident(), threads(), gw.stats()["in_flight"]
                if step == 500:
                    before = kept
        assert kept[2] == 0 and abs(kept[1] - before[1]) <= 2, (before, kept)
        # A leak of one array in each step would be hundreds of MB.
        assert kept[0] - before[0] < 20e6, (before, kept)
        assert bool((tree["a"] == 1).all())
        print("CONSTANT\\n", end="")
        """,
        STEPS="10000" if AT_NIGHT else "2000",
    )
    assert done.returncode == 0 and done.stdout.count("CONSTANT") == 2, done.stdout


def test_a_program_of_several_devices_is_refused(job: Job) -> None:
    done = job(
        """
        import jax
        import jax.numpy as jnp
        import gradwire.jax as gw

        gw.init()
        try:
            jax.jit(gw.allreduce)(jnp.ones(3))
        except gw.InvalidRequest as error:
            print(error)
        """,
        ranks=1,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert "needs one device in each process, and this one has 2" in done.stdout, done.stdout


def test_calls_need_init() -> None:
    text = """
import jax
import jax.numpy as jnp
import gradwire.jax as gw
try:
    gw.allreduce(jnp.ones(3))
except gw.NotInitialized as error:
    print("TOLD", error)
gw.init()
program = jax.jit(gw.allreduce)
program(jnp.ones(3))
gw.shutdown()
try:
    program(jnp.ones(3)).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print("TOLD", error, type(gw.last_error()).__name__)
"""
    done = run([sys.executable, "-c", text])
    assert done.returncode == 0 and done.stdout.count("TOLD") == 2, done.stdout
    assert "NotInitialized" in done.stdout, done.stdout


def test_jax_forms_its_own_job(job: Job) -> None:
    done = job("""
        import jax
        import jax.numpy as jnp
        import gradwire.jax as gw

        gw.init()
        gw.initialize_distributed()
        assert (jax.process_index(), jax.process_count()) == (gw.rank(), gw.size())
        found = gw.allreduce(jnp.full(3, gw.rank() + 1.0), op=gw.Sum)
        assert found.tolist() == [3.0] * 3
        print("FORMED\\n", end="")
    """)
    assert done.returncode == 0 and done.stdout.count("FORMED") == 2, done.stdout


def test_elastic_jobs_are_refused(job: Job) -> None:
    done = job(
        """
        import jax.numpy as jnp
        import gradwire.jax as gw

        gw.init()
        try:
            gw.allreduce(jnp.ones(3))
        except gw.InvalidRequest as error:
            print(error)
        """,
        ranks=1,
        options=["--min-np", "1"],
    )
    assert "can't be used in an elastic job" in done.stdout, done.stdout


def test_the_digits_example(tmp_path: Path) -> None:
    program = str(ROOT / "examples" / "digits_jax.py")
    words = [LAUNCHER, "run", "-np", "2", "--", sys.executable, program, "--epochs", "2"]
    done = run(words)
    assert done.returncode == 0, done.stdout
    [accuracy] = re.findall(r"accuracy (0\.\d+)", done.stdout)
    alone = run([sys.executable, program, "--epochs", "2"])
    losses = [re.findall(r"loss (\d\.\d+)", each.stdout) for each in (done, alone)]
    assert len(losses[0]) == 2 and float(accuracy) > 0.8, done.stdout
    for ours, theirs in zip(*losses):
        assert float(ours) == pytest.approx(float(theirs), rel=1e-4), (done.stdout, alone.stdout)


def test_import_gradwire_does_not_import_jax() -> None:
    text = """
import sys
import gradwire
assert "jax" not in sys.modules
with open("/proc/self/maps") as maps:
    assert "jaxlib" not in maps.read()
assert gradwire.jax.allreduce and "jax" in sys.modules
assert "optax" not in sys.modules
print("END")
"""
    done = run([sys.executable, "-c", text])
    assert done.stdout.endswith("END\n"), done.stdout


def test_the_structures_are_those_of_the_header() -> None:
    """A release of jaxlib may change XLA's interface: then the order of functions shows it."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    theirs = re.findall(r"^  _XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\);", header.read_text(), re.M)
    source = (ROOT / "python" / "src" / "xla" / "abi.rs").read_text()
    [body] = re.findall(r"^struct Api \{\n(.*?)^\}", source, re.M | re.S)
    ours = re.findall(r"^    (\w+): (?:Unused|unsafe extern)", body, re.M)
    found = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in theirs]
    assert ours == found[: len(ours)]


def test_everything_public_is_documented() -> None:
    import inspect

    from test_documentation import complaints

    import gradwire.jax as gw

    public = {name: getattr(gw, name) for name in gw.__all__}
    own = {
        name: value
        for name, value in public.items()
        if inspect.isfunction(value) and value.__module__.startswith("gradwire.jax")
    }
    assert len(own) == 10, sorted(own)
    assert not [text for name, value in own.items() for text in complaints(name, value)]
