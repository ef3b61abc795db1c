"""GPUs of AMD. Here is how a run sees its own; `rocm` finds them."""

from __future__ import annotations

from collections.abc import Mapping

from spool.core.model import Grant

_UUID_LENGTH = 20  # "GPU-" and a unique ID of 16 digits; NVIDIA's UUIDs are longer


def visible(grant: Grant, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a run gets for its GPUs of AMD. One without them is to see none, unless its job says which."""
    uuids = [uuid for uuid in grant.gpu_uuids if len(uuid) == _UUID_LENGTH and uuid.startswith("GPU-")]
    if uuids:  # several GPUs of a run are of one vendor
        return {"ROCR_VISIBLE_DEVICES": ",".join(uuids), "CUDA_VISIBLE_DEVICES": ""}
    return {"ROCR_VISIBLE_DEVICES": environment.get("ROCR_VISIBLE_DEVICES", "")}
