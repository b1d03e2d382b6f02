"""Policy optimisation (PPO): thousands of transitions go through a few states, and each adds to its state's gradient.

The policy and the value of each state of a small grid world are tables. A batch visits every state hundreds of times,
so the tables' gradients are sums over data. A policy that differs in the last bit acts otherwise a few episodes later:
nothing amplifies a lost bit like reinforcement learning. Here each training plays, learns and plays again. Run it:
``python examples/ppo.py``; look inside: ``detpass inspect examples/ppo.py:factory``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from detpass.reproducibility import digest

SIDE, ACTIONS, PLAYERS, LENGTH = 6, 4, 1_000, 16
STEPS = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Embedding(SIDE * SIDE, ACTIONS), nn.Embedding(SIDE * SIDE, 1)
        nn.init.zeros_(self.policy.weight)
        nn.init.zeros_(self.value.weight)

    def forward(self, state: Tensor, action: Tensor, reward: Tensor, before: Tensor) -> Tensor:
        """The loss; ``state``, ``action``, ``reward``, ``before`` (log-probabilities) are ``[players, length]``."""
        value = self.value(state).squeeze(-1)
        future = reward.flip(1).cumsum(1).flip(1)
        advantage = future - value.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        now = self.policy(state).log_softmax(-1).gather(-1, action[..., None]).squeeze(-1)
        ratio = (now - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return (value - future).square().mean() * 0.5 - gain.mean()


@torch.no_grad()
def play(agent: Agent) -> tuple[Tensor, ...]:
    """Let players walk the grid by the policy; the reward is in one corner."""
    place = torch.zeros(PLAYERS, 2, dtype=torch.int64)
    states, actions, rewards, logs = [], [], [], []
    for _ in range(LENGTH):
        state = place[:, 0] * SIDE + place[:, 1]
        chances = agent.policy.weight[state].log_softmax(-1)
        action = torch.multinomial(chances.exp(), 1).squeeze(1)
        place = (place + STEPS[action]).clamp(0, SIDE - 1)
        states.append(state)
        actions.append(action)
        rewards.append((place == SIDE - 1).all(1).float())
        logs.append(chances.gather(1, action[:, None]).squeeze(1))
    return tuple(torch.stack(parts, 1) for parts in (states, actions, rewards, logs))


def factory() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The agent, which returns its loss, and a batch of played transitions."""
    torch.manual_seed(0)
    agent = Agent()
    return agent, play(agent)


def train(agent: Agent, start: dict[str, Tensor], rounds: int = 8) -> tuple[str, float]:
    """Play and learn in turns from the same start and seed; the digest of all bits, and the last mean reward."""
    torch.manual_seed(1)
    agent.load_state_dict(start)
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.1)
    for _ in range(rounds):
        batch = play(agent)
        for _ in range(4):
            optimizer.zero_grad()
            agent(*batch).backward()
            optimizer.step()
    return digest([parameter.detach() for parameter in agent.parameters()]), batch[2].sum(1).mean().item()


def main() -> None:
    """Train three agents under each compiler from the same seed."""
    agent = Agent()
    start = {name: value.clone() for name, value in agent.state_dict().items()}
    for backend in ("inductor", "detpass"):
        torch._dynamo.reset()
        agent.compile(backend=backend)
        agents = [train(agent, start) for _ in range(3)]
        rewards = ", ".join(f"{reward:.3f}" for _, reward in agents)
        print(f"{backend:<9} {len({bits for bits, _ in agents})} different agents of 3, mean rewards {rewards}")
    assert len(set(agents)) == 1


if __name__ == "__main__":
    main()
