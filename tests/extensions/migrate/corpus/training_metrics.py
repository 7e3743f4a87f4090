import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset


def train(net, trainloader, criterion, optimizer, device):
    net.train()
    train_loss = 0
    correct = 0
    total = 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()

        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
    print("loss", train_loss / (batch_idx + 1), "accuracy", 100.0 * correct / total)


def average_loss(net, loader, criterion, device):
    """The mean over the samples."""
    net.eval()
    losses = 0.0
    for inputs, targets in loader:
        with torch.no_grad():
            losses += criterion(net(inputs.to(device)), targets.to(device)).item() * len(inputs)
    return losses / len(loader.dataset)


if __name__ == "__main__":
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(80, 4)
    y = (x.sum(dim=1) > 0).long()
    trainloader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16, shuffle=True)
    testloader = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)
    net = nn.Linear(4, 2)
    net = net.to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for epoch in range(2):
        train(net, trainloader, criterion, optimizer, device)
        scheduler.step()
        print("test", average_loss(net, testloader, criterion, device))
