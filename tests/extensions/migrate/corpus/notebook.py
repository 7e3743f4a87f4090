#!/usr/bin/env python
# coding: utf-8

# # A small classifier

# In[1]:


import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Using {device} device")


# In[2]:


torch.manual_seed(0)
data = torch.randn(72, 5)
labels = (data.sum(1) > 0).long()
train_dl = DataLoader(TensorDataset(data[:64], labels[:64]), batch_size=16, shuffle=True)
test_dl = DataLoader(TensorDataset(data[64:], labels[64:]), batch_size=4)


# In[3]:


net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
loss_fn = nn.CrossEntropyLoss()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)


# In[4]:


for epoch in range(2):
    net.train()
    running_loss = 0.0
    for xb, yb in train_dl:
        xb, yb = xb.to(device), yb.to(device)
        opt.zero_grad()
        pred = net(xb)
        loss = loss_fn(pred, yb)
        loss.backward()
        opt.step()
        running_loss += loss.item()
    print(epoch, running_loss / len(train_dl))


# In[5]:


net.eval()
correct = 0
with torch.no_grad():
    for xb, yb in test_dl:
        out = net(xb.to(device))
        correct += (out.argmax(1) == yb.to(device)).type(torch.float).sum().item()
print("accuracy", correct / len(test_dl.dataset))
