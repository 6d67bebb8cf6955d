"""The cases of each program: ZeRO 1, 2 and 3 with and without offload, bf16, accumulation, clipping and "auto" values."""

from __future__ import annotations

from typing import Any, Final

Case = dict[str, Any]
STAGES: Final = (1, 2, 3)
_BATCHES: Final = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
_OPTIMIZER: Final = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    }
}
_SCHEDULE: Final = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    }
}
_HALVES: Final = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
_WHOLE: Final = _BATCHES | _OPTIMIZER | _SCHEDULE | _HALVES
_CPU: Final = {"device": "cpu", "pin_memory": True}


def _zero(stage: int, **others: Any) -> Case:
    block: Case = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        block |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {"zero_optimization": block | others}


def _offload(stage: int) -> Case:
    return {"offload_optimizer": _CPU} | ({"offload_param": {"device": "cpu"}} if stage == 3 else {})


def trainer(stage: int) -> dict[str, Case]:
    """Return the cases of transformers.Trainer."""
    found: dict[str, Case] = {
        "auto": {"deepspeed": _WHOLE | _zero(stage)},
        "client": {
            "deepspeed": _BATCHES | _HALVES | _zero(stage),
            "arguments": {"gradient_accumulation_steps": 2},
        },
        "offload": {"deepspeed": _WHOLE | _zero(stage, **_offload(stage))},
        "bf16": {
            "deepspeed": _BATCHES | _OPTIMIZER | _HALVES | _zero(stage),
            "arguments": {"bf16": True, "gradient_accumulation_steps": 2},
        },
    }
    if stage == 3:
        unsaved = _zero(3, stage3_gather_16bit_weights_on_model_save=False)
        found |= {
            "pretrained": {"deepspeed": _WHOLE | _zero(3), "pretrained": True},
            "pretrained_bf16": {
                "deepspeed": _WHOLE | _zero(3),
                "pretrained": True,
                "arguments": {"bf16": True},
            },
            "ungathered": {"deepspeed": _WHOLE | unsaved},
            "checkpointing": {
                "deepspeed": _WHOLE | _zero(3),
                "arguments": {"gradient_checkpointing": True},
            },
        }
    return found


def accelerate_loop(stage: int) -> dict[str, Case]:
    """Return the cases of a loop of accelerate.

    The configuration comes from the arguments of a plugin, from a config file of DeepSpeed, or from the environment.
    """
    saved = {"zero3_save_16bit_model": True} if stage == 3 else {}
    places = {"offload_optimizer_device": "cpu"} | ({"offload_param_device": "cpu"} if stage == 3 else {})
    twice = {"gradient_accumulation_steps": 2}
    optimizer = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    }
    file = _BATCHES | {"gradient_clipping": 1.0} | optimizer | _SCHEDULE | _zero(stage)
    return {
        "plugin": {
            "plugin": {"zero_stage": stage, "gradient_clipping": 1.0, **twice, **saved},
            "accelerator": twice,
        },
        "bf16": {"plugin": {"zero_stage": stage, **saved}, "accelerator": {"mixed_precision": "bf16"}},
        "offload": {"plugin": {"zero_stage": stage, "gradient_clipping": 1.0, **places, **saved}},
        "file": {"plugin": {"hf_ds_config": file}, "accelerator": twice},
        # The variables that `accelerate launch` sets from its config file.
        "environment": {
            "environment": {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
                "ACCELERATE_GRADIENT_CLIPPING": "0.5",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
                "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
                "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
                "ACCELERATE_MIXED_PRECISION": "no",
            }
        },
    }


def lightning_fit(stage: int) -> dict[str, Case]:
    """Return the cases of Lightning's DeepSpeedStrategy."""
    found: dict[str, Case] = {
        "clipped": {"strategy": {"stage": stage}, "trainer": {"gradient_clip_val": 1.0}},
        "accumulated": {"strategy": {"stage": stage}, "trainer": {"accumulate_grad_batches": 2}},
        "bf16": {"strategy": {"stage": stage}, "trainer": {"precision": "bf16-true"}},
        "mixed": {"strategy": {"stage": stage}, "trainer": {"precision": "bf16-mixed"}},
        "config": {
            "strategy": {
                "config": {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
            }
        },
    }
    if stage > 1:
        places = {"offload_optimizer": True} | ({"offload_parameters": True} if stage == 3 else {})
        found["offload"] = {"strategy": {"stage": stage, **places}, "cpu_adam": True}
    if stage == 3:
        found["summary"] = {"strategy": {"stage": 3}, "summary": True}
    return found


def sft(stage: int) -> dict[str, Case]:
    """Return the cases of TRL's SFTTrainer, with complete models and with LoRA."""
    found: dict[str, Case] = {
        "whole": {"deepspeed": _WHOLE | _zero(stage)},
        "lora": {"deepspeed": _WHOLE | _zero(stage), "lora": True},
        "lora_bf16": {
            "deepspeed": _BATCHES | _HALVES | _zero(stage),
            "lora": True,
            "arguments": {"bf16": True, "gradient_accumulation_steps": 2},
        },
    }
    if stage > 1:
        found["lora_offload"] = {"deepspeed": _WHOLE | _zero(stage, **_offload(stage)), "lora": True}
    return found


PROGRAMS: Final = {
    "trainer": trainer,
    "accelerate_loop": accelerate_loop,
    "lightning_fit": lightning_fit,
    "sft": sft,
}
