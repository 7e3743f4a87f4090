import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    """Trains a model on a device."""

    def __init__(self, model, optimizer, loader, device):
        self.model = model.to(device)
        self.optimizer = optimizer
        self.loader = loader
        self.device = device
        self.criterion = nn.MSELoss()

    def step(self, batch):
        inputs, targets = batch
        inputs = inputs.to(self.device)
        targets = targets.to(self.device)
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            total = 0.0
            for batch in self.loader:
                total += self.step(batch)
            print("epoch", epoch, "loss", total / len(self.loader))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(96, 8)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, loader, device)
    trainer.fit(2)


if __name__ == "__main__":
    main()
