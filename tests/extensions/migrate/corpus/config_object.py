from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class OptimizerConfig:
    lr: float = 0.02
    weight_decay: float = 0.01


@dataclass
class Config:
    seed: int = 7
    batch_size: int = 16
    epochs: int = 2
    device: str = "cpu"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


def build_model(cfg):
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def build_loaders(cfg):
    x = torch.randn(120, 6)
    y = x.prod(dim=1, keepdim=True)
    train = DataLoader(TensorDataset(x[:96], y[:96]), batch_size=cfg.batch_size, shuffle=True)
    val = DataLoader(TensorDataset(x[96:], y[96:]), batch_size=cfg.batch_size)
    return train, val


def main(cfg):
    torch.manual_seed(cfg.seed)
    model = build_model(cfg).to(cfg.device)
    train_loader, val_loader = build_loaders(cfg)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=cfg.optimizer.lr, weight_decay=cfg.optimizer.weight_decay
    )
    for epoch in range(cfg.epochs):
        model.train()
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x.to(cfg.device)), y.to(cfg.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.eval()
        val_loss = 0.0
        with torch.no_grad():
            for x, y in val_loader:
                x, y = x.to(cfg.device), y.to(cfg.device)
                val_loss += nn.functional.mse_loss(model(x), y).item() * x.size(0)
        print(f"{epoch}: train {loss.item()}, val {val_loss / len(val_loader.dataset)}")


if __name__ == "__main__":
    main(Config())
