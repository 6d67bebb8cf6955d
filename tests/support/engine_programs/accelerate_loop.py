"""A training loop of accelerate on DeepSpeed. Arguments: CASE (JSON), OUT.

The loop trains, clips and accumulates gradients, evaluates, saves and loads.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed

case, out = json.loads(sys.argv[1]), Path(sys.argv[2])


class Model(torch.nn.Module):
    """A model with the ``config`` that accelerate reads to fill in "auto" bucket sizes."""

    config = SimpleNamespace(hidden_size=16)

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh()
        )
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layers(x))


plugin = None
if "plugin" in case:
    plugin = DeepSpeedPlugin(**case["plugin"])
# Without a plugin, accelerate reads its values from environment variables. ``accelerate launch`` sets these
# variables from a config file of accelerate.
accelerator = Accelerator(
    deepspeed_plugin=plugin,
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    **case.get("accelerator", {}),
)
config = accelerator.state.deepspeed_plugin.deepspeed_config
set_seed(5)
model = Model()
if "optimizer" in config:
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
if "scheduler" in config:
    scheduler = DummyScheduler(optimizer, total_num_steps=32, warmup_num_steps=2)
elif "optimizer" in config:
    scheduler = DummyScheduler(
        optimizer, lr_scheduler_callable=lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.5, 1.0, 4)
    )
else:
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
found = {"engine": type(model).__module__, "losses": [], "norms": [], "lr": []}


def train(steps):
    losses = []
    for index, (x, y) in enumerate(loader):
        if index == steps:
            break
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                found["norms"].append(None if norm is None else float(norm))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss))
        found["lr"].append(optimizer.param_groups[0]["lr"])
    return losses


found["losses"] = train(4)
accelerator.save_state(str(out / "state"))
model.eval()
with torch.no_grad():
    x, y = next(iter(loader))
    outputs = model(x.to(next(model.parameters()).dtype)).float()
    found["gathered"] = accelerator.gather_for_metrics(outputs).shape[0]
    found["evaluation"] = float(accelerator.reduce(torch.nn.functional.cross_entropy(outputs, y), "mean"))
model.train()
found["on"] = train(4)
accelerator.load_state(str(out / "state"))
found["again"] = train(4)
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    found["weights"] = {
        name: [list(t.shape), str(t.dtype), float(t.float().norm())] for name, t in state.items()
    }
accelerator.save_model(model, str(out / "saved"))
accelerator.wait_for_everyone()
found["saved"] = sorted(each.name for each in (out / "saved").iterdir())
model.save_checkpoint(str(out / "checkpoint"))
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    whole = get_fp32_state_dict_from_zero_checkpoint(str(out / "checkpoint"))
    found["zero_to_fp32"] = {name: [list(t.shape), float(t.norm())] for name, t in sorted(whole.items())}
accelerator.wait_for_everyone()
(out / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
accelerator.end_training()
