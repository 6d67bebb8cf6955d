"""A program of the transformers Trainer on DeepSpeed. Arguments: CASE (JSON), OUT.

The program trains, evaluates, generates, saves and resumes.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

case, out = json.loads(sys.argv[1]), Path(sys.argv[2])
transformers.utils.logging.set_verbosity_error()
stage = case["deepspeed"]["zero_optimization"]["stage"]


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = (torch.arange(8) * (1 + index % 3) + index) % 32
        return {"input_ids": tokens, "labels": tokens.clone()}


def numbers(log):
    """Return the values of a trainer's log that are equal in every run. Times are left out."""
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    rows = [{name: row[name] for name in kept if row.get(name) is not None} for row in log]
    return [row for row in rows if len(row) > 1]


class Noting(Trainer):
    """A Trainer that records the exact loss of each micro-batch."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(float(loss))
        return loss


def arguments(**others):
    # On a machine without GPUs, accelerate does not choose a backend automatically.
    AcceleratorState._reset_state(True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    given = {
        "output_dir": str(out / "kept"),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
        "use_cpu": True,
        "accelerator_config": {"use_configured_state": True},
        "deepspeed": case["deepspeed"],
    }
    return TrainingArguments(**{**given, **case.get("arguments", {}), **others})


def model():
    torch.manual_seed(3)
    if (out / "pretrained").exists():
        return LlamaForCausalLM.from_pretrained(out / "pretrained", dtype=torch.float32)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
            **case.get("model", {}),
        )
    )


def train(checkpoint=None, **others):
    given = arguments(**others)  # before the model, because stage 3 shards the model during its construction
    trainer = Noting(model(), given, train_dataset=Text(), eval_dataset=Text())
    trainer.train(resume_from_checkpoint=checkpoint)
    found = {"losses": trainer.losses, "log": numbers(trainer.state.log_history)}
    return trainer, found


if case.get("pretrained"):
    if os.environ["RANK"] == "0":
        model().save_pretrained(out / "pretrained")
    while not (out / "pretrained" / "model.safetensors").exists():
        pass
trainer, found = train()
found["engine"] = type(trainer.model_wrapped).__module__
found["evaluate"] = trainer.evaluate()["eval_loss"]
trainer.model.eval()
with torch.no_grad():
    made = trainer.model.generate(
        torch.tensor([[1, 2, 3, 4]]), max_new_tokens=4, do_sample=False, synced_gpus=stage == 3
    )
found["generated"] = made.tolist()
trainer.save_model(str(out / "saved"))
torch.distributed.barrier()
found["saved"] = sorted(each.name for each in (out / "saved").iterdir())
_, found["resumed"] = train(str(out / "kept" / "checkpoint-2"), output_dir=str(out / "again"))
(out / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found, default=str))
