import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION_STEPS = 4
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
x = torch.randn(128, 8)
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Linear(8, 1).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

optimizer.zero_grad()
for epoch in range(2):
    running = 0.0
    for i, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device), targets.to(device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss = loss / ACCUMULATION_STEPS
        loss.backward()
        running += loss.item() * ACCUMULATION_STEPS
        # Step after every fourth batch.
        if (i + 1) % ACCUMULATION_STEPS == 0 or (i + 1) == len(loader):
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    print("epoch", epoch, "loss", running / len(loader))
