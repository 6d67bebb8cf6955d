"""Programs of accelerate, transformers and Lightning on two ranks, with untrained models and without network access.

At its end, each program writes ``flights-RANK.json`` with the operations that torch's Flight Recorder saw,
independently of commprof. In each step the program also issues an all_reduce of three elements, whose purpose
no rule can determine.
"""

from __future__ import annotations

from typing import Final

_FLIGHTS: Final = """
import json, os, pickle, warnings
import torch, torch.distributed as dist
warnings.filterwarnings("ignore")
torch.manual_seed(0)

def own():
    dist.all_reduce(torch.ones(3))

def finish():
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", [])
    with open(f"flights-{os.environ['RANK']}.json", "w") as file:
        json.dump([entry["profiling_name"].rpartition(":")[2] for entry in entries], file)
"""

TRAINER: Final = (
    _FLIGHTS
    + """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        tokens = (torch.arange(8) + index) % 32
        return {"input_ids": tokens, "labels": tokens.clone()}

class Own(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        own()

def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

ends = {"bos_token_id": None, "eos_token_id": None}
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, **ends))
arguments = TrainingArguments(
    output_dir="kept", use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=2,
    logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
    average_tokens_across_devices=True, include_num_input_tokens_seen=True, report_to=[], disable_tqdm=True,
)
with arguments.main_process_first(desc="the data"):
    text = Text()
trainer = Trainer(
    model, arguments, train_dataset=text, eval_dataset=text, compute_metrics=accuracy, callbacks=[Own()]
)
trainer.train()
finish()
"""
)

ACCELERATE: Final = (
    _FLIGHTS
    + """
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list

loaders = DataLoaderConfiguration(dispatch_batches=True)
accelerator = Accelerator(cpu=True, dataloader_config=loaders, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
with accelerator.main_process_first():
    pass
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (x,) in data:
    with accelerator.accumulate(model):
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.gather_for_metrics(loss.detach().reshape(1))
    accelerator.reduce(loss.detach())
    own()
accelerator.pad_across_processes(torch.ones(1 + accelerator.process_index))
accelerator.check_trigger()
broadcast_object_list([accelerator.process_index])
accelerator.wait_for_everyone()
accelerator.save_state("kept")
accelerator.wait_for_everyone()
accelerator.load_state("kept")
finish()
"""
)

LIGHTNING: Final = (
    _FLIGHTS
    + """
import lightning, torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        own()
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        found = self.layer(x)
        self.accuracy(found, y)
        self.log("accuracy", self.accuracy)
        self.log("val_loss", torch.nn.functional.cross_entropy(found, y), sync_dist=True)

    def on_validation_epoch_end(self):
        self.all_gather(torch.ones(2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
kept = [ModelCheckpoint("kept", monitor="val_loss"), EarlyStopping("val_loss")]
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, gradient_clip_val=1.0, callbacks=kept, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), loader, loader)
trainer.save_checkpoint("kept/last.ckpt")
trainer.validate(Module(), loader, verbose=False)
finish()
"""
)
