"""A classifier with Fabric: accumulation, clipping, an evaluation and checkpoints, at the top of the script."""
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
fabric.launch()
fabric.seed_everything(0, workers=False)

x = torch.randn(96, 8)
y = (x.sum(dim=1) > 0).long()
train_set, test_set = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
loader = DataLoader(train_set, batch_size=8, shuffle=True)
test_loader = DataLoader(test_set, batch_size=8)
with fabric.init_module():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
model, optimizer = fabric.setup(model, optimizer)
loader, test_loader = fabric.setup_dataloaders(loader, test_loader)
state = {"model": model, "optimizer": optimizer, "epoch": 0}

for epoch in range(2):
    model.train()
    for step, (inputs, targets) in enumerate(loader):
        accumulating = step % 2 == 0
        # The gradients of two batches are averaged.
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.cross_entropy(model(inputs), targets) / 2
            fabric.backward(loss)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    state["epoch"] = epoch
    fabric.save("state.ckpt", state)

    model.eval()
    correct = total = 0
    test_loss = 0.0
    for inputs, targets in test_loader:
        with torch.no_grad():
            outputs = model(inputs)
        test_loss += nn.functional.cross_entropy(outputs, targets, reduction="sum").item()
        predicted = outputs.argmax(dim=1)
        predicted, targets = fabric.all_gather((predicted, targets))
        correct += int((predicted == targets).sum())
        total += targets.numel()
    weight = sum(parameter.abs().sum().item() for parameter in model.parameters())
    fabric.log("accuracy", correct / total, step=epoch)
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"epoch {epoch}: {correct} of {total} correct, loss {mean.item():.6f}, weight {weight:.6f}")

fabric.barrier()
state["epoch"] = 7
remainder = fabric.load("state.ckpt", state)
fabric.print(state["epoch"], len(remainder), f"{fabric.all_gather(test_loss).sum().item() / len(test_set):.6f}")
fabric.save("model.ckpt", {"model": model})
fabric.load_raw("model.ckpt", model, strict=False)
