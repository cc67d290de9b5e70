"""How the batches of a task are mixed."""

from utils.mixup.mixing import Mixing


def build_mixing(settings, height: int = 1, width: int = 1) -> Mixing | None:
    """How training batches are mixed; None: not at all.

    Args:
        height, width: of pictures, in pixels.
    """
    if settings.mixing == "none":
        return None
    return Mixing(
        alpha=0.0 if settings.mixup == "none" else settings.alpha,
        cutmix_alpha=settings.cutmix_alpha,
        probability=settings.mixup_prob,
        per_sample=settings.mixup_mode == "sample",
        block=settings.mixup_block or settings.batch_size,
        off_epoch=settings.mixup_off_epoch,
        different=settings.mixup_inter,
        height=height,
        width=width,
        learned=settings.meta_form if settings.mixup == "meta" else "",
        clean=settings.meta_batch,
        clean_every=settings.meta_every,
    )
