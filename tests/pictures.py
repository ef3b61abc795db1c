"""Draw the pictures of the documentation anew: `python tests/pictures.py docs/pictures`.

They show a real spool with a real dispatcher and real runs; only the GPUs are those of tests/fake_nvml.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from calling import start
from plugins.fake_nvml import GIB, SOURCE, FakeNvml
from spool.cli.tui.app import Top
from spool.store.spool import Spool
from support import make_spool, wait_for

SIZE = (100, 30)
_USED = ((77, 97), (69, 94), (46, 88), (28, 61))  # GiB of each GPU, and how much it computes
_EPOCHS = """
for epoch in 1 2 3 4 5 6 7; do echo "epoch $epoch/12  loss 0.${left}$((97 - 9 * epoch))  accuracy 0.$((61 + 4 * epoch))"
done; printf '\\repoch 8/12: %3d%%|%s| %d/1200 [00:09<00:14, 52.4it/s]' "$percent" "$bar" "$((12 * percent))"
sleep 1000
"""


def _training(percent: int, left: int) -> str:
    cells = "█" * (percent // 5)
    assigned = f"percent={percent}; left={left}; bar='{cells.ljust(20)}'"
    return f"command = '''{assigned}{_EPOCHS}'''\n"


JOBS = {
    "preprocess": 'command = "echo 1281167 images"\ncpus = 4\n',
    "smoke_test": 'command = "echo no CUDA here; exit 3"\n',
    "train_vit_base": _training(63, 4) + 'gpus = 1\ncpus = 8\nmemory = "12G"\npriority = 50\nproject = "vision"\n',
    "train_resnet50": _training(27, 7) + 'gpus = 1\ncpus = 4\nmemory = "4G"\npriority = 40\nproject = "vision"\n',
    "finetune_llm": _training(88, 2) + 'gpus = 2\ncpus = 2\nmemory = "2G"\npriority = 60\n',
    "index_papers": 'command = "echo reading; sleep 1000"\ncpus = 2\nmemory = "1G"\npriority = 45\n',
    "distill_vit": 'command = "true"\ngpus = 2\ncpus = 2\npriority = 40\n',
    **{f"sweep_lr_{at}": 'command = "true"\ngpus = 1\ncpus = 2\npriority = 30\n' for at in (1, 2, 3)},
    "evaluate_vit": 'command = "true"\ncpus = 1\ndepends_on = ["train_vit_base"]\npriority = 30\n',
    "nightly_backup": 'command = "true"\nstart_after = "2099-01-01T03:00:00Z"\npriority = 5\n',
}


def _fill(root: Path) -> None:
    """Have what ended end, and what runs run, before the rest is put into the queue."""
    for name, text in JOBS.items():
        (root / f"queued/{name}.toml").write_text(text)
        if name in ("preprocess", "smoke_test"):
            wait_for(lambda name=name: (root / f"done/{name}.toml").exists())
        elif "1000" in text:
            wait_for(lambda name=name: (root / f"running/{name}.toml").exists())
    (root / "held/retrain_all.toml").write_text('command = "true"\ngpus = 4\n')


def _gpus(directory: Path) -> FakeNvml:
    library = directory / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    fake = FakeNvml(library, directory)
    for index in range(len(_USED)):
        fake.gpu(f"GPU-{index}", bus=index, name="NVIDIA H100 80GB HBM3")
    return fake


def _use(fake: FakeNvml, spool: Spool) -> None:
    """Have the runs use the GPUs that they were given."""
    for name in spool.names("running"):
        grant, jid = spool.grant(name, 1), spool.jid(name, 1)
        for index in grant.grant.gpu_indices if grant is not None else ():
            used, percent = _USED[index]
            fake.process(f"GPU-{index}", getattr(jid, "pid", 0), used * GIB)
            fake.gpu(f"GPU-{index}", bus=index, free=(80 - used) * GIB, name="NVIDIA H100 80GB HBM3")
            fake.busy(f"GPU-{index}", percent, 30)


async def _draw(root: Path, path: Path, theme: str, size: tuple[int, int]) -> None:
    app = Top(str(root), theme)
    async with app.run_test(size=size) as pilot:
        while app._seen is None or len(app._seen.active) < len(JOBS) - 1:
            await pilot.pause(0.1)
        await pilot.press("down")
        await pilot.pause(3)
        text = app.export_screenshot(title="spool top")
    path.write_text(re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL))  # they would be fetched from elsewhere


def main() -> None:
    """Draw all pictures into the directory that is named."""
    into = Path(sys.argv[1])
    into.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        os.environ["HOME"] = directory
        root = make_spool(home / ".spool")
        (root / "config.toml").write_text('cpus = 24\nmemory = "21G"\n')
        fake = _gpus(home)
        os.environ.update(fake.variables)
        os.environ["SPOOL_DIR"] = str(root)
        dispatcher = start("dispatch")
        try:
            wait_for(Spool(str(root)).dispatcher_lives)
            _fill(root)
            _use(fake, Spool(str(root)))
            time.sleep(8)
            asyncio.run(_draw(root, into / "top.svg", "dark", SIZE))
            for each in sys.argv[2:]:  # THEME:COLUMNSxLINES, for whoever wants to look at others
                theme, columns, lines = re.split("[:x]", each)
                name = f"top-{theme}-{columns}x{lines}.svg"
                asyncio.run(_draw(root, into / name, theme, (int(columns), int(lines))))
        finally:
            for path in (*root.glob("queued/*.toml"), *root.glob("held/*.toml"), *root.glob("running/*.toml")):
                path.unlink(missing_ok=True)
            wait_for(lambda: not list(root.glob("running/*")) and not _live(root))
            dispatcher.terminate()
            dispatcher.communicate(timeout=30)


def _live(root: Path) -> list[Path]:
    return [path for path in root.glob("jobs/*/*") if not (path / "result.toml").exists()]


if __name__ == "__main__":
    main()
