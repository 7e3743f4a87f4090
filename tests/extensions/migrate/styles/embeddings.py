import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.manual_seed(4)
device = "cuda" if torch.cuda.is_available() else "cpu"
features = torch.randn(130, 10)
labels = (features[:, 0] + features[:, 1] > 0).float()
train_dl = DataLoader(TensorDataset(features[:80], labels[:80]), batch_size=10, shuffle=True)
val_dl = DataLoader(TensorDataset(features[80:], labels[80:]), batch_size=12)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(10, 6)
        self.score = nn.Linear(6, 1)

    def forward(self, x):
        return self.score(torch.relu(self.embed(x))).squeeze(1)


def auc(scores, targets):
    order = scores.argsort()
    ranks = torch.empty(len(scores)).scatter_(0, order, torch.arange(1.0, len(scores) + 1))
    positive = targets == 1
    n = positive.sum()
    return ((ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(targets) - n))).item()


model = Scorer().to(device)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
epochs = 3
accum = 2
total_steps = epochs * len(train_dl) // accum
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))


def train_one_epoch(epoch):
    model.train()
    running = 0.0
    for i, (x, y) in enumerate(train_dl):
        x, y = x.to(device), y.to(device)
        loss = criterion(model(x), y) / accum
        loss.backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        running += loss.item() * accum
    print(f"epoch {epoch} loss {running / len(train_dl):.6f} lr {scheduler.get_last_lr()[0]:.6f}")


def validate():
    model.eval()
    scores, targets = [], []
    with torch.no_grad():
        for x, y in tqdm(val_dl, disable=True):
            scores.append(model(x.to(device)).cpu())
            targets.append(y)
    scores, targets = torch.cat(scores), torch.cat(targets)
    print(f"auc {auc(scores, targets):.6f} of {len(targets)}")


for epoch in range(epochs):
    train_one_epoch(epoch)
    validate()
torch.save(model.state_dict(), "weights.pt")
