import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Experiment:
    def __init__(self, lr=0.05):
        torch.manual_seed(3)
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.model = nn.Linear(8, 2).to(self.device)
        self.optimizer = optim.Adam(self.model.parameters(), lr=lr)
        x = torch.randn(80, 8)
        y = (x[:, 0] > 0).long()
        self.train_loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16, shuffle=True)
        self.val_loader = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)
        self.loss = nn.CrossEntropyLoss()

    def train_epoch(self):
        self.model.train()
        for x, y in self.train_loader:
            x, y = x.to(self.device), y.to(self.device)
            loss = self.loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        correct, total = 0, 0
        for x, y in self.val_loader:
            x, y = x.to(self.device), y.to(self.device)
            predicted = self.model(x).argmax(dim=1)
            correct += (predicted == y).sum().item()
            total += y.size(0)
        return correct / total

    def run(self):
        for epoch in range(2):
            loss = self.train_epoch()
            print(f"epoch {epoch} loss {loss} accuracy {self.evaluate()}")


if __name__ == "__main__":
    Experiment().run()
