"""Other names for settings and their values: what timm, torchvision, Hugging Face and hand-made
scripts call them."""

# Another name -> the setting. Each works on the command line and as a YAML key of every entry that
# has the setting. docs/flags.md lists them.
ALIASES = {
    "aa": "auto_augment",
    "adam_epsilon": "eps",
    "amp_dtype": "precision",
    "aug_repeats": "ra_reps",
    "b": "batch_size",
    "bs": "batch_size",
    "clip_grad": "clip",
    "clip_grad_norm": "clip",
    "crop_pct": "crop_ratio",
    "cutmix": "cutmix_alpha",
    "data_path": "data_dir",
    "dataloader_num_workers": "workers",
    "decay_epochs": "step_epochs",
    "decay_milestones": "milestones",
    "decay_points": "milestones",
    "decay_rate": "gamma",
    "drop": "drop_rate",
    "epoch": "epochs",
    "epochs_for_sche": "epochs_for_sched",
    "eval_metric": "best_by",
    "grad_accum_steps": "accumulation_steps",
    "gradient_accumulation_steps": "accumulation_steps",
    "gradient_clipping": "clip",
    "img_size": "image_size",
    "init_h": "sync_init",
    "j": "workers",
    "label_smoothing_factor": "label_smoothing",
    "learning_rate": "lr",
    "log_interval": "log_every",
    "log_pth": "output",
    "logging_steps": "log_every",
    "lr_gamma": "gamma",
    "lr_min": "min_lr",
    "lr_scheduler": "sched",
    "lr_scheduler_type": "sched",
    "lr_step_size": "step_epochs",
    "lr_warmup_epochs": "warmup_epochs",
    "max_grad_norm": "clip",
    "max_lr": "lr",
    "max_seq_length": "max_len",
    "metric_for_best_model": "best_by",
    "min_h": "sync_base",
    "mixup_alpha": "mixup",
    "model_ema_decay": "ema_decay",
    "n": "output",
    "num_train_epochs": "epochs",
    "nw": "workers",
    "opt": "optimizer",
    "opt_betas": "betas",
    "opt_eps": "eps",
    "opt_level": "precision",
    "optim": "optimizer",
    "output_dir": "output",
    "patience_epochs": "plateau_patience",
    "per_device_train_batch_size": "batch_size",
    "physical_batch_size": "batch_size",
    "power": "qsr_power",
    "r": "resume",
    "random_erase": "random_erasing",
    "recipe_pth": "config",
    "report_to": "wandb",
    "reprob": "random_erasing",
    "save_steps": "save_every",
    "save_total_limit": "checkpoint_hist",
    "scheduler": "sched",
    "smoothing": "label_smoothing",
    "test_only": "eval_only",
    "torchcompile": "compile",
    "total_batch_size": "global_batch",
    "train_crop_size": "image_size",
    "use_deterministic_algorithms": "deterministic",
    "val_crop_size": "eval_size",
    "val_resize_size": "val_resize",
    "wd": "weight_decay",
    "weights": "pretrained",
}
# Flags that are known elsewhere and mean something else here, or nothing: what to do instead.
MEANINGS = {
    "aug_splits": "AugMix is not supported; --auto_augment has other policies",
    "augmix_severity": "AugMix is not supported; --auto_augment has other policies",
    "avg_m": "--optimizer_average averages both of Adam's moments",
    "avg_v": "--optimizer_average averages both of Adam's moments",
    "checkpoint": "--resume RUN goes on with a run, --pretrained FILE starts from its weights, "
    "and --output names the folder of a new run",
    "class_weights": "classes count by their samples here; there are no weights of classes yet",
    "config_pth": "--host_config FILE gives folders by host name, --config FILE all other settings",
    "crop_mode": "--resize_mode crop (timm's center), squash or letterbox (its border)",
    "experiment": "--output FOLDER names the folder of the run",
    "interpolation": "pictures are resized bicubically, and --auto_augment moves pixels "
    "bilinearly; leave it out",
    "jsd_loss": "AugMix is not supported; leave it out",
    "kfac_damping": "natural gradients are --ngd here, and --ngd_alpha is the damping",
    "kfac_factor_update_steps": "natural gradients are --ngd here, with --ngd_update_period",
    "kfac_inv_update_steps": "natural gradients are --ngd here, with --ngd_update_period",
    "kfac_name": "natural gradients are --ngd here",
    "model": "vit_test.py has any classifier of timm by --model; this script trains a model of its "
    "own, which --help describes",
    "num_classes": "it follows from the data; leave it out",
    "opt_kwargs": "each optimizer has flags of its own, which --help lists",
    "patience": "--early_stop_patience 10 stops the run, --plateau_patience 5 lowers the learning "
    "rate with --sched plateau",
    "ra_magnitude": "--auto_augment ra-m9 sets the magnitude, of 30",
    "ratio": "--crop resized crops with ratios of 3:4 to 4:3; leave it out",
    "remode": "rectangles are filled with the mean colour; leave it out",
    "resume_from_epoch": "--resume RUN goes on where the run has stopped; --epochs counts all of "
    "its epochs, not those that are left",
    "resume_from_step": "--resume RUN goes on where the run has stopped",
    "save_freq": "--save_every 500 counts steps, 10m minutes and 1e epochs",
    "scale": "--crop_area 0.08 sets the least area of a crop; the largest is the picture's",
    "start_epoch": "--resume RUN goes on where the run has stopped; --epochs counts all of its "
    "epochs, not those that are left",
    "steps_per_epoch": "it follows from the data and the batch size; leave it out",
    "train_crop_mode": "--crop resized is timm's rrc; other modes are not supported",
    "train_interpolation": "pictures are resized bicubically; leave it out",
    "val_split": "--val_fraction 0.1 holds out a validation split; a folder val/ is found, too",
    "vflip": "pictures are mirrored left to right alone, by --hflip",
}
# Flags for one of the numbers of a setting -> the setting, and which of its numbers. The others are
# those of the default.
PART_OF = {
    "adam_beta1": ("betas", 0),
    "adam_beta2": ("betas", 1),
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
}
# Flags without a value -> the setting and value that they are short for; in YAML `ngd: true`.
SHORT_FOR = {
    "amp": ("precision", "auto"),
    "bf16": ("precision", "bf16"),
    "fp16": ("precision", "fp16"),
    "log_wandb": ("wandb", "online"),
    "model_ema": ("ema_decay", 0.9998),
    "meta_learning": ("mixup", "meta"),
    "ngd": ("optimizer", "ngd"),
    "ra_sampler": ("ra_reps", 3),
}
# Of these, those that give way where the setting itself is given, too.
GIVES_WAY = ("amp", "model_ema", "ra_sampler")
# (setting, value) -> beside which other setting it means another value: PyTorch scripts call
# torch.optim's MultiStepLR "step", too.
MEANT = {("sched", "step"): ("milestones", "multistep")}
# Optimizers of the QSR repository -> ours with --strategy local; their --alpha is --qsr_alpha.
LOCAL = {"localadamw": "adamw", "localsgd": "sgd"}
# Settings whose value may be a number in place of a word: --mixup 0.2 is short for --mixup fixed
# --alpha 0.2, and --mixup 0 for --mixup none.
NUMBER_FOR = {"mixup": ("fixed", "alpha", "none")}
# Other spellings of a value.
VALUE_ALIASES: dict[str, dict] = {
    "best_by": {"eval_accuracy": "accuracy", "eval_loss": "loss", "top1": "accuracy"},
    "clip": {"none": 0.0},  # also where an optimizer limits the norm by default
    "compile": {"inductor": True},  # timm's --torchcompile takes the name of a backend
    "dataset": {  # torchtext's names
        "amazonreviewfull": "amazon_full",
        "amazonreviewpolarity": "amazon_polarity",
        "dbpedia": "dbpedia",
        "imdb": "imdb",
        "yahooanswers": "yahoo_answers",
        "yelpreviewfull": "yelp_full",
        "yelpreviewpolarity": "yelp_polarity",
        "ag_news": "ag_news",
    },
    "engine": {"onnx": "ort", "onnxruntime": "ort", "ortmodule": "ort", "pytorch": "torch"},
    "mixup_mode": {"elem": "sample"},
    "optimizer": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
    "precision": {
        "float32": "fp32",
        "bfloat16": "bf16",
        "float16": "fp16",
        "o0": "fp32",  # Apex's levels
        "o1": "fp16",
        "o2": "fp16",
    },
    "sched": {
        "cosineannealinglr": "cosine",
        "linearlr": "linear",
        "multisteplr": "multistep",
        "onecyclelr": "onecycle",
        "reducelronplateau": "plateau",
        "constant_with_warmup": "constant",
        "reduce_lr_on_plateau": "plateau",
        "steplr": "step",
    },
    "wandb": {"wandb": "online", "all": "online", "tensorboard": "disabled", "none": "disabled"},
}
# Values that are known elsewhere and mean something else here: what to do instead.
VALUE_MEANINGS = {
    "precision": {
        "o3": "weights in fp16 lose small updates, so there is no such level; --opt_level O1 keeps "
        "them in float32",
    },
}
# Values that something is taken for which is not quite the same: the difference, for a note.
VALUE_NOTES = {
    "precision": {
        "o2": "Apex's O2 has no exact equivalent: as with O1, autocast computes in fp16, and all "
        "weights are in float32",
    },
}
