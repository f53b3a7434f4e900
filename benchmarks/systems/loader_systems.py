"""Systems that are measured alone: loaders, and decoders."""

from benchmarks.systems import other_systems, systems
from benchmarks.systems.systems import DALI, TORCH, TORCHDALI, System

_JPEGS = ("imagenet", "large", "progressive")
_PROXY = "nvidia.dali.plugin.pytorch.experimental.proxy"

LOADER = {
    "torchdali": System("**torchdali**, defaults", TORCHDALI, systems.torchdali, threads="its own", cores="all"),
    "dali_tuned": System("DALI tuned by hand", DALI, systems.dali_tuned, threads="tried", cores="all"),
    "dali_tuned_read": System(
        "DALI tuned by hand, files read instead of mapped", DALI, systems.dali_tuned_read, threads="tried"
    ),
    "dali_documented": System("DALI as documented", DALI, systems.dali_documented),
    "dali_proxy": System(
        "DALI's proxy",
        (*TORCH, *DALI, _PROXY),
        other_systems.dali_proxy,
        threads="half",
        data=_JPEGS,
        exits=False,
        workers=True,
    ),
    "dali_torchvision": System(
        "DALI's torchvision classes in a DataLoader loop",
        (*TORCH, "nvidia.dali.experimental.torchvision"),
        other_systems.dali_torchvision,
        cores="most",
        needs_cuda=True,
        data=_JPEGS,
        workers=True,
    ),
    "torchvision_cuda": System(
        "torchvision, decoding and v2 on CUDA",
        TORCH,
        other_systems.torchvision_cuda,
        cores="most",
        needs_cuda=True,
        data=_JPEGS,
        workers=True,
    ),
    "dataloader_v2": System("DataLoader, torchvision v2 on tensors", TORCH, systems.dataloader_v2, workers=True),
    "dataloader_pil": System("DataLoader, PIL", TORCH, systems.dataloader_pil, cores="most", workers=True),
    "spdl": System(
        "SPDL, torchvision v2 in threads",
        (*TORCH, "spdl.pipeline"),
        other_systems.spdl,
        cores="most",
        package="spdl",
        workers=True,
    ),
    "ffcv": System("FFCV", ("torch", "ffcv"), other_systems.ffcv, cores="most", package="ffcv", data=_JPEGS),
}
DECODE = {
    "torchdali": System(
        "**torchdali**, decode and crop only",
        TORCHDALI,
        systems.torchdali_decode,
        output="uint8 first",
        threads="its own",
    ),
    "dali_decode_only": System(
        "DALI, decode and crop only", DALI, systems.dali_decode_only, output="uint8 last", threads="tried"
    ),
    "torchvision_cuda": System(
        "torchvision, decode_jpeg on CUDA",
        TORCH,
        other_systems.torchvision_cuda_decode,
        output="uint8 first",
        needs_cuda=True,
        data=_JPEGS,
        workers=True,
    ),
    "dataloader_v2": System(
        "DataLoader, torchvision's decoder",
        TORCH,
        systems.dataloader_decode,
        output="uint8 first",
        cores="most",
        workers=True,
    ),
}
SYSTEMS = {"loader": LOADER, "decode": DECODE}
