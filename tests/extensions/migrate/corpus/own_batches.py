import torch
from torch import nn

torch.manual_seed(0)
data = torch.arange(256.0).view(-1, 8) / 256
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())

for step in range(3):
    batch = data[torch.randint(len(data), (4,))]
    loss = nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
