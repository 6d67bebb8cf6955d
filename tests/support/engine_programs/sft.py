"""TRL's SFTTrainer on DeepSpeed, with LoRA (PEFT) if the case requests it. Arguments: CASE (JSON), OUT."""

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

case, out = json.loads(sys.argv[1]), Path(sys.argv[2])
transformers.utils.logging.set_verbosity_error()


def tokenizer():
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(28))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


data = Dataset.from_dict(
    {"text": [" ".join(f"w{(n * (1 + m % 3) + m) % 28}" for n in range(8)) for m in range(32)]}
)


def numbers(log):
    """Return the values of a trainer's log that are equal in every run. Times are left out."""
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    rows = [{name: row[name] for name in kept if row.get(name) is not None} for row in log]
    return [row for row in rows if len(row) > 1]


class Noting(SFTTrainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(float(loss))
        return loss


def arguments(**others):
    AcceleratorState._reset_state(True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    given = {
        "output_dir": str(out / "kept"),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
        "max_length": 16,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "accelerator_config": {"use_configured_state": True},
        "deepspeed": case["deepspeed"],
    }
    return SFTConfig(**{**given, **case.get("arguments", {}), **others})


def model():
    torch.manual_seed(3)
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
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def adapter():
    if not case.get("lora"):
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )


def train(checkpoint=None, **others):
    given = arguments(**others)
    trainer = Noting(model(), given, train_dataset=data, processing_class=tokenizer(), peft_config=adapter())
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, {"losses": trainer.losses, "log": numbers(trainer.state.log_history)}


trainer, found = train()
found["engine"] = type(trainer.model_wrapped).__module__
trainer.save_model(str(out / "saved"))
torch.distributed.barrier()
found["saved"] = sorted(each.name for each in (out / "saved").iterdir())
if os.environ["RANK"] == "0":
    from safetensors.torch import load_file

    name = "adapter_model.safetensors" if case.get("lora") else "model.safetensors"
    if (out / "saved" / name).exists():
        state = load_file(out / "saved" / name)
        found["weights"] = {
            name: [list(t.shape), float(t.float().norm())] for name, t in sorted(state.items())
        }
_, found["resumed"] = train(str(out / "kept" / "checkpoint-2"), output_dir=str(out / "again"))
(out / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found, default=str))
