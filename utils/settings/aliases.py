"""Other names for settings and their values: what timm, torchvision, Hugging Face and hand-made
scripts call them."""

# Setting -> its other names. Each works on the command line and as a YAML key of every entry that
# has the setting. docs/flags.md lists them.
OTHER_NAMES = {
    "accumulation_steps": "grad_accum_steps gradient_accumulation gradient_accumulation_steps",
    "auto_augment": "aa",
    "batch_size": "b bs per_device_train_batch_size physical_batch_size",
    "best_by": "eval_metric metric_for_best_model",
    "betas": "opt_betas",
    "checkpoint_hist": "save_total_limit",
    "class_weights": "cls_weight",
    "clip": "clip_grad clip_grad_norm gradient_clipping max_grad_norm",
    "compile": "torchcompile",
    "config": "c recipe_pth",
    "crop_ratio": "crop_pct",
    "cutmix_alpha": "cutmix",
    "data_dir": "data_path",
    "deterministic": "use_deterministic_algorithms",
    "drop_rate": "drop",
    "ema_decay": "model_ema_decay",
    "epochs": "e epoch num_train_epochs",
    "epochs_for_sched": "epochs_for_sche",
    "eps": "adam_epsilon opt_eps",
    "eval_only": "test_only",
    "eval_size": "val_crop_size",
    "eval_views": "flip_test",
    "focal_gamma": "fl_gamma",
    "gamma": "decay_rate dr lr_gamma",
    "global_batch": "total_batch_size",
    "group_by": "groups split_by",
    "group_column": "group_col",
    "image_size": "img_size train_crop_size",
    "label_smoothing": "label_smoothing_factor smoothing",
    "log_every": "log_interval logging_steps",
    "lr": "l learning_rate max_lr",
    "max_len": "max_seq_length",
    "metrics": "metric eval_metrics",
    "milestones": "decay_milestones decay_points",
    "min_lr": "lr_min",
    "mixup": "mixup_alpha",
    "optimizer": "opt optim",
    "output": "exp_name log_pth n output_dir",
    "plateau_patience": "patience_epochs",
    "precision": "amp_dtype opt_level",
    "pretrained": "initial_checkpoint weights",
    "qsr_power": "power",
    "ra_reps": "aug_repeats",
    "random_erasing": "random_erase reprob",
    "resume": "r",
    "save_every": "save_steps",
    "sched": "lr_scheduler lr_scheduler_type scheduler",
    "seed": "s seed_num",
    "step_epochs": "decay_epochs lr_step_size",
    "sync_base": "min_h",
    "sync_init": "init_h",
    "time_budget": "time",
    "val_resize": "val_resize_size",
    "wandb": "report_to",
    "warmup_epochs": "lr_warmup_epochs w",
    "weight_decay": "wd",
    "workers": "dataloader_num_workers j nw",
}
ALIASES = {alias: name for name, others in OTHER_NAMES.items() for alias in others.split()}
# Flags that are known elsewhere and mean something else here, or nothing: what to do instead.
_MEANINGS = {
    "aug_splits augmix_severity jsd_loss": "AugMix is not supported; --auto_augment has others",
    "bce_loss bce_target_thresh": "the loss is cross-entropy, or that of --loss FILE.py:NAME",
    "ckpt_to_save": "--save_every 1e --checkpoint_hist 300 keeps the checkpoint of every epoch",
    "config_pth": "--host_config FILE gives folders by host name, --config FILE all other settings",
    "crop_mode": "--resize_mode crop (timm's center), squash or letterbox (its border)",
    "cpu_offload": "for less memory: --strategy fsdp, --grad_checkpointing, --auto_batch",
    "experiment": "--output FOLDER names the folder of the run",
    "hostfile": "HOSTFILE=FILE bash run_distributed.sh ... starts the processes of its nodes",
    "in_chans": "the channels follow from the data; leave it out",
    "init_model_by_seed": "--seed sets the initial weights, with all else that is random; "
    "--pretrained FILE starts runs with several seeds from equal weights",
    "input_size": "--image_size 224 is the side of a square; channels follow from the data",
    "interpolation": "pictures are resized bicubically, and --auto_augment moves pixels "
    "bilinearly; leave it out",
    "kfac_damping": "natural gradients are --ngd here, and --ngd_alpha is the damping",
    "kfac_factor_update_steps kfac_inv_update_steps": "natural gradients are --ngd here, with "
    "--ngd_update_period",
    "kfac_name": "natural gradients are --ngd here",
    "lr_base": "--lr 0.1 --lr_base_size 256 scales with the batch, but linearly for all optimizers",
    "mean std": "pictures are normalised by those of the training data, or of published weights",
    "model": "vit_test.py has any classifier of timm by --model; this script trains a model of its "
    "own, which --help describes",
    "multi_label multilabel": "several labels a sample are not supported yet: train a classifier "
    "for each label, with the classes yes and no",
    "num_classes": "it follows from the data; leave it out",
    "opt_kwargs": "each optimizer has flags of its own, which --help lists",
    "patience": "--early_stop_patience 10 stops the run, --plateau_patience 5 lowers the learning "
    "rate with --sched plateau",
    "ra_magnitude": "--auto_augment ra-m9 sets the magnitude, of 30",
    "rand_aug_depth rand_aug_severity": "--auto_augment rand-m10-n2 names the magnitude, m, and "
    "the operations, n",
    "ratio": "--crop resized crops with ratios of 3:4 to 4:3; leave it out",
    "regression": "numbers are not predicted yet, only classes: divide the numbers into ranges, "
    "and name each range as a class",
    "recount": "--random_erasing fills one rectangle; leave it out",
    "remode": "rectangles are filled with the mean colour; leave it out",
    "remove_stopwords": "--stopwords english leaves them out",
    "resume_pth optimizer_resume_pth": "--resume RUN goes on with a run, --pretrained FILE starts "
    "a new one from its weights",
    "scale": "--crop_area 0.08 sets the least area of a crop; the largest is the picture's",
    "start_epoch resume_from_epoch resume_from_step": "--resume RUN goes on where the run has "
    "stopped; --epochs counts all of its epochs, not those that are left",
    "train_crop_mode": "--crop resized is timm's rrc; other modes are not supported",
    "train_interpolation": "pictures are resized bicubically; leave it out",
    "val_split": "--val_fraction 0.1 holds out a validation split; a folder val/ is found, too",
    "vflip": "pictures are mirrored left to right alone, by --hflip",
}
MEANINGS = {name: text for names, text in _MEANINGS.items() for name in names.split()}
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
    "weighted_sampler": ("class_sampler", "balanced"),
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
    "clip": {"none": 0.0, "inf": 0.0},  # also where an optimizer limits the norm by default
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
    "eval_views": {"true": "mirror", "false": "none"},
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
        "const": "constant",
        "steplr": "step",
    },
    "wandb": {"wandb": "online", "all": "online", "tensorboard": "disabled", "none": "disabled"},
}
# Values that are known elsewhere and mean something else here: what to do instead.
VALUE_MEANINGS = {
    "wandb": {"mlflow": "--trackers mlflow logs to MLflow"},
    "sched": {"cosine_step": "learning rates are not rounded to powers: take cosine or step"},
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
