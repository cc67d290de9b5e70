"""Flags of the machine and its arithmetic."""

from dataclasses import dataclass

from utils.setting import setting
from utils.settings.config import Config

GROUP = "engine"


@dataclass
class EngineSettings(Config):
    device: str = setting(
        "auto",
        "Where to compute; auto takes a GPU where there is one",
        group=GROUP,
        choices=("auto", "cpu", "cuda"),
        resume="free",
    )
    precision: str = setting(
        "auto",
        "Arithmetic of the forward pass; auto: bf16 where the GPU has it, "
        "fp16 with a loss scaler on older ones, fp32 on a CPU",
        group=GROUP,
        choices=("auto", "fp32", "bf16", "fp16"),
        resume="evaluation",
    )
    compile: bool = setting(
        False,
        "Compile the model with torch.compile; takes minutes at the start on a CPU",
        group=GROUP,
        resume="free",
    )
    fused: str = setting(
        "none",
        "memory: keep about half of the activations and make the rest again in the backward pass, "
        "which takes a little longer, for a GPU; speed: only go over them less often; the same "
        "results",
        group=GROUP,
        choices=("none", "memory", "speed"),
        resume="free",
    )
    cuda_graphs: str = setting(
        "auto",
        "Capture the whole optimizer step on a GPU once and replay it, so that the host launches "
        "it at once. auto: where launching a step takes nearly all of its time, as with small "
        "models and batches, never with --deterministic; on, also the flag alone: wherever it can "
        "be, and where not, a line says why; off, also --no_cuda_graphs: never",
        group=GROUP,
        choices=("auto", "on", "off"),
        bare="on",
        resume="free",
    )
    deterministic: bool = setting(
        False, "The same bits on every run on a GPU too, at the price of speed", group=GROUP
    )
    threads: int | None = setting(
        None,
        "CPU threads for arithmetic. Without this flag they are fewer while other programs keep "
        "cores busy, and results then differ in the last bits",
        group=GROUP,
        low=1,
        unit="threads",
        default_text="PyTorch's choice",
        resume="free",
    )
    keep_freed_memory: bool = setting(
        True,
        "On a CPU with glibc: what is freed stays with the process for its next step, instead of "
        "going back to the system and coming anew; faster, for up to a fifth more memory",
        group=GROUP,
        resume="free",
    )
    seed: int = setting(
        0,
        "Seed of the weights, the order, the augmentation, --val_fraction and --subset",
        group=GROUP,
        low=0,
        high=2**32 - 1,
    )

    def ineffective(self):
        yield from super().ineffective()
        if self.device == "cuda":
            yield "keep_freed_memory", "only what is computed on a CPU is kept so", "device"
        if self.deterministic and self.device == "cpu":
            yield "deterministic", "runs on a CPU are always deterministic", "device"
        if self.fused != "none":
            if self.compile:
                yield "fused", "--compile decides by itself what is kept", "compile"
            if self.freeze_backbone and self.unfreeze_epoch is None:
                yield "fused", "a frozen backbone keeps nothing anyway", "freeze_backbone"
            if self.mixup == "meta" and self.meta_form == "sample":
                reason = "the virtual steps of --meta_form sample are plain, and need the most"
                yield "fused", reason, "meta_form"
