"""What ``gradwire run`` inherits from its starter: ignored signals and limits."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from launching import LAUNCHER, LIMIT, Job

IGNORES = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_a_starter_that_ignores_sigchld(job: Job) -> None:
    starter = [sys.executable, "-c", IGNORES]
    text = """
    import subprocess, sys
    import gradwire as gw
    gw.init()
    gw.barrier()
    print("CHILD", subprocess.run(["sh", "-c", "exit 3"]).returncode)
    sys.exit(4 * len(sys.argv[1:]))
    """
    done = job(text, before=starter)
    assert done.stdout.count("CHILD 3") == 2 and done.returncode == 0, done.stdout
    done = job(text.replace("4 *", "4 +"), before=starter)
    assert "ended with exit code 4, " in done.stdout and done.returncode == 4, done.stdout


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    words = ["run", "-np", "1", "--output-dir", "logs", "--", "sh", "-c"]
    script = f"yes {1000 * 'x'} | head -c 8000000; sleep 100"
    done = subprocess.run(
        [LAUNCHER, *words, script],
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        # CPython ignores SIGXFSZ, and programs that it starts would inherit that.
        preexec_fn=lambda: (
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL),
            resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000)),
        ),
    )
    assert done.returncode == 1, done.stderr
    [said] = [line for line in done.stderr.splitlines() if "output can't be written" in line]
    assert "logs/rank.00/stdout" in said and "File too large" in said, said
    assert not (tmp_path / "gradwire").exists()
