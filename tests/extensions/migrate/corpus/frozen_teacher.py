import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).to(device).eval()
student = nn.Linear(6, 3).to(device)
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=16, shuffle=True)

for epoch in range(2):
    for (x,) in loader:
        x = x.to(device)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2.0, dim=1)
        loss = F.kl_div(F.log_softmax(student(x) / 2.0, dim=1), soft, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch %d loss %r" % (epoch, loss.item()))
