"""Flags of the machine and its arithmetic."""

from dataclasses import dataclass
from functools import partial

from ..errors import UserError
from ..machine.packages import require
from ..setting import setting
from .config import Config, refuse_beside
from .distributed import STRATEGIES

machine_flag = partial(setting, group="machine")
ENGINES = ("torch", "ort")


@dataclass
class EngineSettings(Config):
    device: str = machine_flag(
        "auto",
        "Where to compute; auto: on a GPU if there is one",
        choices=("auto", "cpu", "cuda"),
        resume="free",
    )
    precision: str = machine_flag(
        "auto",
        "Arithmetic of the forward pass; auto: bf16 if the GPU has it, fp16 with a loss "
        "scaler on older GPUs, fp32 on a CPU; fastest: also bf16 on a CPU that is faster so "
        "(AMX, Arm's bf16), but not for texts; the run keeps what it was at its start",
        choices=("auto", "fastest", "fp32", "bf16", "fp16"),
        resume="evaluation",
    )
    keep_fp32: str | None = machine_flag(
        None,
        "Names of modules that compute in float32 whatever --precision is; * stands for any "
        "characters, as in head,layers.*.norm1",
        many=True,
        resume="evaluation",
    )
    engine: str = machine_flag(
        "torch",
        "Library that computes the network. torch: PyTorch; ort: ONNX Runtime, on a CPU in "
        "float32; experimental in training, where it needs the packages of requirements-ort.txt. "
        "--eval_only and --predict use torch, whatever the run used, unless ort is given again",
        choices=ENGINES,
        resume="free",
    )
    compile: bool = machine_flag(
        False,
        "Compile the model with torch.compile; the first step then takes seconds to minutes longer",
        resume="free",
    )
    fused: str = machine_flag(
        "none",
        "memory: recompute cheap activations in the backward pass, which saves a third to a half "
        "of their memory, for GPUs; speed: read and write activations less often. Both give the "
        "same results",
        choices=("none", "memory", "speed"),
        resume="free",
    )
    cuda_graphs: str = machine_flag(
        "auto",
        "Capture the whole optimizer step on a GPU and replay it with a single launch. auto: "
        "if launching takes nearly all of a step's time, as with small models and batches, "
        "but never with --deterministic; on (also the flag alone): whenever possible, with a "
        "note if it is not; off (also --no_cuda_graphs): never",
        choices=("auto", "on", "off"),
        bare="on",
        resume="free",
    )
    deterministic: bool = machine_flag(
        False,
        "Make runs repeatable bit for bit: on a GPU at the price of speed; on a CPU by keeping "
        "the number of threads fixed, as --threads does",
    )
    threads: int | None = machine_flag(
        None,
        "CPU threads for arithmetic. Without this flag fewer are used while other programs "
        "keep cores busy, and results then differ in the last bits",
        low=1,
        unit="threads",
        default_text="PyTorch's choice",
        resume="free",
    )
    keep_freed_memory: bool = machine_flag(
        True,
        "On a CPU with glibc, keep freed memory for the next step instead of returning it to "
        "the system: faster, for up to a fifth more memory",
        resume="free",
    )
    seed: int = machine_flag(
        0,
        "Seed of the weights, order, augmentation, mixing, dropout, --val_fraction and --subset",
        low=0,
        high=2**32 - 1,
    )

    @property
    def infers_by_ort(self) -> bool:
        """Whether ONNX Runtime computes what --eval_only or --predict asks for."""
        action = self.action
        return self.engine == "ort" and not action.trains and "engine" not in action.without_effect

    def ineffective(self):
        yield from super().ineffective()
        if self.device == "cuda":
            yield "keep_freed_memory", "it is for computing on a CPU", "device"
        if self.precision == "fp32":
            yield "keep_fp32", "--precision fp32 computes everything in float32", "precision"
        if self.fused != "none":
            if self.compile:
                yield "fused", "--compile decides by itself what is kept", "compile"
            if self.trains_head_alone:
                yield "fused", "a frozen backbone keeps no activations anyway", "freeze_backbone"
            if self.mixup == "meta" and self.meta_form == "sample":
                reason = (
                    "the virtual steps of --meta_form sample are not fused, and need most memory"
                )
                yield "fused", reason, "meta_form"

    def validate(self):
        super().validate()
        if self.engine == "ort" and self.action.trains:
            self._check_training_by_ort()
        elif self.infers_by_ort:
            self._check_inference_by_ort()
        if self.keep_fp32 is not None and self.fused != "none":
            raise UserError(
                f"--keep_fp32 and --fused {self.fused} exclude each other: a fused function "
                "computes several modules at once; leave one of them out"
            )

    def _check_inference_by_ort(self) -> None:
        """Raises UserError if a package is missing, or a flag excludes ONNX Runtime."""
        require("--engine ort", "onnx", "onnxscript", "onnxruntime")
        precision, reduced = f"--precision {self.precision}", self.precision not in ("auto", "fp32")
        others = (
            ("--device cuda", self.device == "cuda", "it computes on a CPU; add --device cpu"),
            (precision, reduced, "it computes in float32; add --precision fp32"),
            (
                "--distributed",
                self.distributed,
                f"--{self.action.name} by ONNX Runtime takes one process; do not use "
                "run_distributed.sh",
            ),
        )
        refuse_beside("--engine ort", others)

    def _check_training_by_ort(self) -> None:
        """Raises UserError if a flag excludes ONNX Runtime."""
        divides = self.distributed and STRATEGIES[self.strategy].divides
        drop_path = getattr(self, "drop_path", 0.0)
        precision, reduced = f"--precision {self.precision}", self.precision not in ("auto", "fp32")
        others = (
            ("--device cuda", self.device == "cuda", "it trains on a CPU only"),
            (precision, reduced, "it computes in float32"),
            ("--compile", self.compile, "torch.compile is another engine"),
            ("--cuda_graphs", self.cuda_graphs == "on", "CUDA graphs are another engine"),
            (f"--fused {self.fused}", self.fused != "none", "the fused modules are PyTorch's"),
            (
                "--grad_checkpointing",
                self.grad_checkpointing,
                "ONNX Runtime decides by itself which activations are kept",
            ),
            (f"--strategy {self.strategy}", divides, "ONNX Runtime needs whole weights; take ddp"),
            (
                "--sync_bn",
                self.distributed and self.sync_bn,
                "ONNX Runtime's graph exchanges no statistics between processes",
            ),
            (
                "--mixup meta",
                self.mixup == "meta",
                "ONNX Runtime gives no gradient of the mixing weight",
            ),
            (
                "--auto_batch",
                self.auto_batch,
                "--auto_batch measures the memory of PyTorch's steps",
            ),
            (
                f"--drop_path {drop_path:g}",
                drop_path > 0,
                "a resumed run could not repeat its random numbers",
            ),
        )
        refuse_beside("--engine ort", others)
