"""The flow of the tests: an order that is checked, perhaps approved, paid and shipped."""

from dataclasses import dataclass, replace
from datetime import timedelta

import holdfast as hf


@dataclass
class Order:
    """The state."""

    cents: int = 0
    approved: bool = True
    approved_by: str = ""
    in_stock: bool = False
    payment: str = ""
    reservation: str = ""
    parcel: str = ""


@dataclass
class Approval:
    """What a manager sends."""

    by: str
    is_granted: bool = True


class Shop:
    """An app with the flow `fulfil`, and what its activities have done."""

    def __init__(self, **failing: int) -> None:
        self.app = hf.App("shop")
        self.done: list[str] = []
        self.called: list[str] = []
        self.failing = failing
        app = self.app

        @app.activity
        async def check_stock(order: Order) -> Order:
            self.note("check_stock")
            return replace(order, in_stock=True)

        @app.activity
        async def charge(order: Order) -> Order:
            self.note("charge")
            return replace(order, payment=f"paid {order.cents}")

        @app.activity
        async def reserve(order: Order) -> Order:
            self.note("reserve")
            return replace(order, reservation="shelf 7")

        @app.activity
        async def ship(order: Order) -> Order:
            self.note("ship")
            return replace(order, parcel=f"{order.payment}, {order.reservation}")

        @app.activity
        async def refund(order: Order) -> None:
            self.note(f"refund {order.payment}")

        @app.activity
        async def release(order: Order) -> None:
            self.note(f"release {order.reservation}")

        self.check_stock, self.charge, self.reserve, self.ship = check_stock, charge, reserve, ship
        self.refund, self.release = refund, release
        self.fulfil = app.flow(
            "fulfil",
            Order,
            hf.Scene(
                hf.Act(check_stock),
                hf.Cue(
                    self.is_large,
                    then=hf.Signal(
                        "approval",
                        Approval,
                        on_receive=self.approve,
                        timeout=timedelta(days=2),
                        on_timeout=self.reject,
                    ),
                ),
                hf.Chorus(
                    hf.Act(charge, compensate=refund, retry=hf.Retry(max_attempts=1)),
                    hf.Act(reserve, compensate=release, retry=hf.Retry(max_attempts=1)),
                    condition=lambda order: order.approved,
                ),
                hf.Act(ship, retry=hf.Retry(max_attempts=1), condition=self.may_ship),
            ),
        )

    def note(self, what: str) -> None:
        """Take note of an effect, or fail if the test asks for it."""
        name = what.partition(" ")[0]
        if self.failing.get(name, 0):
            self.failing[name] -= 1
            raise hf.NonRetryable(f"{name} is broken")
        self.done.append(what)

    def is_large(self, order: Order) -> bool:
        self.called.append("is_large")
        return order.cents > 100_00

    def approve(self, order: Order, approval: Approval) -> Order:
        self.called.append("approve")
        return replace(order, approved=approval.is_granted, approved_by=approval.by)

    def reject(self, order: Order) -> Order:
        self.called.append("reject")
        return replace(order, approved=False)

    def may_ship(self, order: Order) -> bool:
        self.called.append("may_ship")
        return order.approved
