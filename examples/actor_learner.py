"""Actors play, a learner learns: each round the actors get the newest policy, and the learner all that they have seen.

The learner is an actor in the other sense: `ordered=True` makes its methods run one at a time, so it needs no lock.

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
    """Walks on a line, and is rewarded for being near 0: a world small enough to be exact."""

    def __init__(self, number: int) -> None:
        self.policy = make_policy()
        self.chance = torch.Generator().manual_seed(100 + number)

    def play(self, weights: State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What was seen, done and earned in one episode."""
        self.policy.load_state_dict(weights)
        place = torch.randn(1, dtype=torch.float64, generator=self.chance)
        seen, done, earned = [], [], []
        with torch.no_grad():
            for _ in range(MOVES):
                seen.append(torch.cat([place, place.square()]))
                step = torch.multinomial(self.policy(seen[-1]).softmax(0), 1, generator=self.chance)
                place = place + 0.2 * (2 * step - 1)
                done.append(step)
                earned.append(-place.abs())
        return torch.stack(seen), torch.stack(done), torch.cat(earned)


class Learner:
    """Improves the policy whenever all actors have brought an episode."""

    def __init__(self) -> None:
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.episodes: dict[int, tuple[torch.Tensor, ...]] = {}
        self.losses: list[float] = []

    def weights(self) -> State:
        return self.policy.state_dict()

    def bring(self, number: int, episode: tuple[torch.Tensor, ...]) -> None:
        self.episodes[number] = episode
        if len(self.episodes) < len(ACTORS):
            return
        episodes = [self.episodes[number] for number in sorted(self.episodes)]
        seen, done, earned = (torch.stack(part) for part in zip(*episodes, strict=True))
        returns = earned.flip(1).cumsum(1).flip(1)
        advantage = (returns - returns.mean(1, keepdim=True)) / returns.std(1, keepdim=True)
        chosen = self.policy(seen).log_softmax(2).gather(2, done).squeeze(2)
        loss = -(chosen * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.episodes = {}

    def report(self) -> list[float]:
        return self.losses


def train_alone() -> list[float]:
    """The same in one process."""
    learner, players = Learner(), [Player(number) for number in range(len(ACTORS))]
    for _ in range(ROUNDS):
        weights = {name: weight.clone() for name, weight in learner.weights().items()}
        for number, player in enumerate(players):
            learner.bring(number, player.play(weights))
    return learner.report()


if __name__ == "__main__":
    with telegrad.rpc.session():
        me = telegrad.get_worker_info().name
        mine = telegrad.RRef(Learner(), ordered=True) if me == "learner" else None
        learner = telegrad.all_gather(mine)["learner"]
        player = Player(ACTORS.index(me)) if me in ACTORS else None
        for _ in range(ROUNDS):
            if player is not None:
                learner.rpc_async().bring(ACTORS.index(me), player.play(learner.rpc_sync().weights())).wait()
            telegrad.barrier()  # the learner has learned from this round, and the next begins
        if me == "learner":
            losses, expected = learner.rpc_sync().report(), train_alone()
            far = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            print(f"loss after {ROUNDS} rounds: {losses[-1]:.4f}\nlargest difference to one process: {far:.1e}")
