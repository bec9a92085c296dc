"""What does a crash do to a workflow? The explorer plays it once for each point at which its process can crash."""

import holdfast as hf
from holdfast.testing import explore

app = hf.App("transfer")
accounts: dict[str, int] = {}
done: dict[str, int] = {}


def open_accounts() -> None:
    accounts.update(ann=100, bob=0)
    done.clear()


@app.activity
async def deposit(to: str, cents: int) -> None:
    accounts[to] += cents  # a crash after this line, and before the result is recorded, deposits again


async def was_moved(move_id: str, to: str, cents: int) -> hf.Completed | hf.NotCompleted:
    return hf.Completed(None) if move_id in done else hf.NotCompleted()


@app.activity(idempotency_key=lambda move_id: move_id, verify=was_moved)
async def move(move_id: str, to: str, cents: int) -> None:
    accounts[to] += cents
    done[move_id] = cents


@app.workflow
async def naive(to: str, cents: int) -> None:
    await deposit(to, cents)


@app.workflow
async def careful(to: str, cents: int) -> None:
    await move(f"gift to {to}", to, cents)


def main() -> None:
    print("Without an idempotency key:")
    print(explore(app, naive, "bob", 25, before=open_accounts, check=lambda: accounts["bob"]).table())
    print("\nWith a key, and a verifier that asks the bank:")
    print(explore(app, careful, "bob", 25, before=open_accounts, check=lambda: accounts["bob"]).table())


if __name__ == "__main__":
    main()
