"""Containers: the command of a job runs in an image. Here is the key of a job file that says so."""

from __future__ import annotations

from spool.formats.capabilities import REQUIRED, Key, KeyTable, Part

RUNTIMES = ("podman", "docker", "apptainer")
"""What can run a container, in the order in which it is looked for."""

# A row stays a row of a table.
# fmt: off

_CONTAINER = KeyTable(
    "ContainerTable",
    "The image in which the command runs, and how.",
    image := Key("image", "label", "Name of the image, or the path of a file of apptainer.", default=REQUIRED,
        option="--container IMAGE", help="Run the command in a container of this image.", rare=True),
    Key("runtime", "word", "What runs the container. Default: the first of these that is installed.",
        words=RUNTIMES),
    Key("options", "options of a program",
        "More options for `podman run`, `docker run` or `apptainer exec`, such as `--volume=/data:/data:ro`.",
        default=(), examples=[["--volume=/data:/data:ro"]]),
    short=image,
)

JOB = Part(
    Key("container", _CONTAINER,
        "Run the command in a container: the name of an image, or a table. The container gets the granted CPUs, memory "
        "and GPUs, the working directory and the metadir."),
    after="setup",
    reader="spool.extras.containers.runtimes:READER",
)
