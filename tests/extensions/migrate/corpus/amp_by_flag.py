import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
use_amp = torch.cuda.is_available()
g = torch.Generator().manual_seed(5)
X = torch.randn(96, 10, generator=g)
Y = (X.sum(1) > 0).long()
train_dl = DataLoader(TensorDataset(X[:64], Y[:64]), batch_size=16, shuffle=True)
valid_dl = DataLoader(TensorDataset(X[64:], Y[64:]), batch_size=16)
net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2)).to(DEVICE)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, steps_per_epoch=len(train_dl), epochs=3)
scaler = GradScaler("cuda", enabled=use_amp)
loss_fn = nn.CrossEntropyLoss()

for epoch in range(3):
    net.train()
    running = 0.0
    for xb, yb in train_dl:
        xb, yb = xb.to(DEVICE), yb.to(DEVICE)
        opt.zero_grad(set_to_none=True)
        with autocast("cuda", enabled=use_amp):
            out = net(xb)
            loss = loss_fn(out, yb)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        running += loss.item() * xb.size(0)
    net.eval()
    correct = 0
    with torch.no_grad():
        for xb, yb in valid_dl:
            xb, yb = xb.to(DEVICE), yb.to(DEVICE)
            with autocast("cuda", enabled=use_amp):
                pred = net(xb).argmax(dim=1)
            correct += (pred == yb).sum().item()
    print(f'epoch {epoch} train {running / len(train_dl.dataset):.6f} acc {correct / len(valid_dl.dataset):.6f}')
torch.save(net.state_dict(), 'net.pt')
