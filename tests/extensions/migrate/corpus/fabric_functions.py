"""A regression with Fabric in functions and a class, which Fabric launches."""
import lightning as L
import torch
from lightning.fabric.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    def __init__(self, fabric: L.Fabric, every):
        self.fabric = fabric
        self.every = every

    def report(self, step, loss):
        value = self.fabric.all_reduce(loss.detach(), reduce_op="mean")
        if step % self.every == 0 and self.fabric.is_global_zero:
            print(f"step {step} loss {value.item():.6f}")


def build_loader(fabric, batch_size):
    with fabric.rank_zero_first(local=True):
        x = torch.randn(48, 4)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=batch_size)
    return fabric.setup_dataloaders(loader)


def main(fabric, batch_size, epochs=1):
    L.seed_everything(1)
    loader = build_loader(fabric=fabric, batch_size=batch_size)
    model = fabric.setup_module(nn.Linear(4, 1))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    progress = Progress(fabric, 2)
    offset = fabric.to_device(torch.zeros(1))

    @rank_zero_only
    def finish(text):
        print(text)

    for epoch in range(fabric.broadcast(epochs)):
        for step, (x, y) in enumerate(loader):
            with fabric.autocast():
                loss = nn.functional.mse_loss(model(x) + offset, y)
            optimizer.zero_grad()
            fabric.backward(loss, model=model)
            fabric.clip_gradients(model, optimizer, clip_val=0.25)
            optimizer.step()
            progress.report(step, loss)
    finish(f"{fabric.world_size - fabric.world_size} {model.module.weight.sum().item():.6f}")


if __name__ == "__main__":
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.launch(main, 12, epochs=2)
