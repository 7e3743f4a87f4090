import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x = torch.randn(60, 4)
dataset = TensorDataset(x, (x.sum(dim=1) > 0).long())

scores = []
for fold in range(3):
    test_ids = list(range(fold * 20, fold * 20 + 20))
    train_ids = [i for i in range(60) if i not in test_ids]
    train_loader = DataLoader(Subset(dataset, train_ids), batch_size=8, shuffle=True)
    test_loader = DataLoader(Subset(dataset, test_ids), batch_size=8)
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, labels in train_loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    correct = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            correct += (model(inputs).argmax(dim=1) == labels).sum().item()
    scores.append(correct / len(test_ids))
    print(f"fold {fold}: loss {loss.item()}, accuracy {scores[-1]}")
print("mean", sum(scores) / len(scores))
