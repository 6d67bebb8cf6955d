"""A program of Lightning's DeepSpeedStrategy. Arguments: CASE (JSON), OUT.

The program trains, validates, saves, resumes, and converts the checkpoint to one fp32 file.
"""

import copy
import json
import logging
import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
case, out = json.loads(sys.argv[1]), Path(sys.argv[2])


class OnCpu(DeepSpeedStrategy):
    """A DeepSpeedStrategy without the two checks that allow only GPUs."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self):
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self):
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.losses, self.validated = [], []
        self.model = None

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(2)
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.model(x).float(), y)
        self.losses.append(float(loss))
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.model(x).float(), y)
        self.validated.append(float(loss))
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        if case.get("cpu_adam"):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(self.parameters(), lr=1e-2)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4), "interval": "step"}
        ]


torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,)))


def loader():
    return torch.utils.data.DataLoader(data, batch_size=2)


def trainer(**others):
    strategy = OnCpu(accelerator=None, process_group_backend="gloo", **copy.deepcopy(case["strategy"]))
    given = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "strategy": strategy,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": case.get("summary", False),
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1,
        "callbacks": [ModelCheckpoint(out / "kept", filename="{epoch}", save_top_k=-1)],
        "limit_train_batches": 4,
    }
    return lightning.Trainer(**{**given, **case.get("trainer", {}), **others})


module = Module()
one = trainer()
one.fit(module, loader(), loader())
found = {
    "losses": module.losses,
    "validated": module.validated,
    "engine": type(one.strategy.model).__module__,
}
one.validate(module, loader(), verbose=False)
found["validate"] = module.validated[-1]
found["predicted"] = (
    one.predict(module, loader(), return_predictions=True) is not None if case.get("predict") else None
)
path = str(out / "kept" / "epoch=0.ckpt")
again = Module()
two = trainer(callbacks=[ModelCheckpoint(out / "again")])
two.fit(again, loader(), loader(), ckpt_path=path)
found["resumed"] = again.losses
if one.is_global_zero:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(path, "checkpoint")
    found["whole"] = {name: [list(t.shape), float(t.norm())] for name, t in sorted(state.items())}
one.strategy.barrier()
(out / f"found-{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))
