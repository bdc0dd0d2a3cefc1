"""Actors and a learner: in each round the actors fetch the newest policy and send their episodes to the learner.

The learner is itself an ordered actor: `ordered=True` runs its methods one at a time, so it needs no lock.

    telegrad run --names learner,actor0,actor1 examples/actor_learner.py
"""

import torch

import telegrad

ACTORS = ["actor0", "actor1"]
ROUNDS, MOVES = 20, 32
State = dict[str, torch.Tensor]


def make_policy() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()


class Player:
    """Walks on a line and is rewarded for being near 0."""

    def __init__(self, number: int) -> None:
        self.policy = make_policy()
        self.generator = torch.Generator().manual_seed(100 + number)

    def play(self, weights: State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the observations, actions and rewards of one episode."""
        self.policy.load_state_dict(weights)
        position = torch.randn(1, dtype=torch.float64, generator=self.generator)
        observations, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(MOVES):
                observations.append(torch.cat([position, position.square()]))
                action = torch.multinomial(self.policy(observations[-1]).softmax(0), 1, generator=self.generator)
                position = position + 0.2 * (2 * action - 1)
                actions.append(action)
                rewards.append(-position.abs())
        return torch.stack(observations), torch.stack(actions), torch.cat(rewards)


class Learner:
    """Improves the policy whenever all actors have sent an episode."""

    def __init__(self) -> None:
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.episodes: dict[int, tuple[torch.Tensor, ...]] = {}
        self.losses: list[float] = []

    def weights(self) -> State:
        return self.policy.state_dict()

    def add_episode(self, number: int, episode: tuple[torch.Tensor, ...]) -> None:
        self.episodes[number] = episode
        if len(self.episodes) < len(ACTORS):
            return
        episodes = [self.episodes[number] for number in sorted(self.episodes)]
        observations, actions, rewards = (torch.stack(part) for part in zip(*episodes, strict=True))
        returns = rewards.flip(1).cumsum(1).flip(1)
        advantage = (returns - returns.mean(1, keepdim=True)) / returns.std(1, keepdim=True)
        log_probabilities = self.policy(observations).log_softmax(2).gather(2, actions).squeeze(2)
        loss = -(log_probabilities * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.episodes = {}

    def report(self) -> list[float]:
        return self.losses


def train_alone() -> list[float]:
    """Train the same model in one process."""
    learner, players = Learner(), [Player(number) for number in range(len(ACTORS))]
    for _ in range(ROUNDS):
        weights = {name: weight.clone() for name, weight in learner.weights().items()}
        for number, player in enumerate(players):
            learner.add_episode(number, player.play(weights))
    return learner.report()


if __name__ == "__main__":
    with telegrad.rpc.session():
        me = telegrad.get_worker_info().name
        mine = telegrad.RRef(Learner(), ordered=True) if me == "learner" else None
        learner = telegrad.all_gather(mine)["learner"]
        player = Player(ACTORS.index(me)) if me in ACTORS else None
        for _ in range(ROUNDS):
            if player is not None:
                learner.rpc_sync().add_episode(ACTORS.index(me), player.play(learner.rpc_sync().weights()))
            telegrad.barrier()  # the learner has updated the policy before the next round begins
        if me == "learner":
            losses, expected = learner.rpc_sync().report(), train_alone()
            difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            print(f"loss after {ROUNDS} rounds: {losses[-1]:.4f}\nlargest difference to one process: {difference:.1e}")
