import argparse
from collections import deque
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=8)
parser.add_argument("--log-interval", type=int, default=2)
args = parser.parse_args()


class Walk:
    """A walk on a line that ends at either end."""

    reward_threshold = 9.5

    def reset(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.position = int(self.rng.integers(2, 6))
        self.steps = 0
        return self._observe(), {}

    def _observe(self):
        return np.eye(8, dtype=np.float32)[self.position]

    def step(self, action):
        self.position += 1 if action else -1
        self.steps += 1
        done = self.position in (0, 7)
        return self._observe(), float(self.position == 7) * 10, done, self.steps >= 20, {}


env = Walk()
env.reset(seed=args.seed)
torch.manual_seed(args.seed)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(8, 16)
        self.affine2 = nn.Linear(16, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
eps = np.finfo(np.float32).eps.item()


def select_action(state):
    state = torch.from_numpy(state).float().unsqueeze(0)
    probs = policy(state)
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R = 0
    policy_loss = []
    returns = deque()
    for r in policy.rewards[::-1]:
        R = r + args.gamma * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


def main():
    running_reward = 1
    for i_episode in count(1):
        state, _ = env.reset()
        ep_reward = 0
        for t in range(1, 100):
            action = select_action(state)
            state, reward, done, cut, _ = env.step(action)
            policy.rewards.append(reward)
            ep_reward += reward
            if done or cut:
                break
        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        finish_episode()
        if i_episode % args.log_interval == 0:
            print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage reward: {running_reward:.6f}")
        if running_reward > env.reward_threshold:
            print(f"Solved! Running reward is now {running_reward}")
            break
        if i_episode >= args.episodes:
            break
    torch.save(policy.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
