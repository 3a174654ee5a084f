"""The five scenes. Each shows what it claims by what the processes wrote down."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from example_project import app, jobs
from example_project.settings import TTL
from example_project.stage.runs import fences_grow, of_kind, take_turns
from task_lease import LeaseLost
from task_lease.host import this_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from example_project.stage.play import Play

#: The invoices that are issued during the deploy.
DEPLOYED = range(2050, 2056)
#: The entries of the ledger with which a demo begins.
ENTRIES = [
    "invoice:2041",
    "invoice:2077",
    "balance:acme",
    "month:2026-01",
    "payments:bank-17",
    "payments:bank-18",
    "statements:2026-01",
    "figures:2026-01",
    *(f"invoice:{number}" for number in DEPLOYED),
]
#: The workers: the first is replaced by the new one.
OLD, OTHER, NEW, RQ = "celery-1", "celery-2", "celery-3", "rq-1"
#: Seconds that "at once" may take: too few for a lease to run out, for it has at least
#: two thirds of its TTL left when its holder dies.
AT_ONCE = TTL * 0.6
_COPIES = 5
# Three TTLs have nine, and some may be late.
_FEWEST_BEATS = 6
# Much longer than a scene: for runs that do not come to their end.
_FOR_EVER = 60.0
# Long enough to be seen in the picture.
_MEANWHILE = 0.7


def duplicates(play: Play) -> None:
    """Five duplicates sent together: one runs, the others do what their policy says."""
    stage = play.stage
    stage.say("5 x issue_invoice(2041) to Celery; its policy: skip")
    issued = [app.issue_invoice.delay(2041, seconds=1.5) for _ in range(_COPIES)]
    stage.say("5 x count_payment('acme'): 3 to Celery (wait), 2 to RQ (retry)")
    for _ in range(3):
        app.count_payment.delay("acme", seconds=0.4)
    for _ in range(2):
        play.reports.enqueue(jobs.count_payment, "acme", seconds=0.4)
    results = play.until_stored(issued)

    skipped = _skipped(results)
    ran = play.runs("invoice:2041")
    names_holder = all(record["holder"]["id"] == ran[0].id for record in skipped)
    stage.check(
        "invoice 2041 was issued once; four were skipped, and say who held the lease",
        shown=(len(ran), len(skipped), names_holder) == (1, _COPIES - 1, True),
        headline="1 runs, 4 are skipped",
    )
    counted = play.until_ended("balance:acme", _COPIES)
    entry = play.ledger.look("balance:acme")
    at_rq = sum(run.worker == RQ for run in counted)
    stage.check(
        "five payments were counted one at a time, 3 at Celery and 2 at RQ; "
        f"the ledger says {entry.state}",
        shown=len(counted) == _COPIES
        and take_turns(counted)
        and fences_grow(counted)
        and (at_rq, entry.state) == (2, "5 payments"),
        headline="5 payments take turns",
    )


def long_job(play: Play) -> None:
    """A job of three TTLs keeps its lease."""
    stage = play.stage
    stage.say(f"close_month('2026-01') to RQ; it takes 3 TTLs, {3 * TTL:g} s")
    play.reports.enqueue(jobs.close_month, "2026-01", seconds=3 * TTL)
    holder = play.until_begun("month:2026-01")
    late = []
    for ttls in (1, 2):
        stage.play_for(TTL * 1.1)
        stage.say(
            f"after more than {ttls} TTL: a duplicate to Celery; its policy: skip"
        )
        late.append(app.close_month.delay("2026-01", seconds=0.1))
    (run,) = play.until_ended("month:2026-01")[:1]
    results = play.until_stored(late)

    skipped = _skipped(results)
    beats = of_kind(stage.moments(), "renewed", holder.lease)
    held = run.ended - run.began
    stage.check(
        f"one run kept its lease for {held:.1f} s, {held / TTL:.1f} TTLs, "
        f"by {len(beats)} beats; both duplicates were skipped",
        shown=len(play.runs("month:2026-01")) == 1
        and held >= 3 * TTL
        and len(beats) >= _FEWEST_BEATS
        and {beat.fence for beat in beats} == {holder.fence}
        and len(skipped) == len(late),
        headline=f"held for {held:.1f} s by {len(beats)} beats",
    )


def kill(play: Play) -> None:
    """``kill -9`` of the holder in mid-task: taken over."""

    def to_celery(file: str, seconds: float) -> None:
        app.import_payments.delay(file, seconds=seconds)

    def to_rq(file: str, seconds: float) -> None:
        play.reports.enqueue(jobs.import_payments, file, seconds=seconds)

    _kill_holder(play, "bank-17", "a pool child of Celery", to_celery, to_rq)
    _kill_holder(play, "bank-18", "a work-horse of RQ", to_rq, to_celery)


def _kill_holder(
    play: Play,
    file: str,
    victim: str,
    send: Callable[[str, float], None],
    send_duplicate: Callable[[str, float], None],
) -> None:
    stage, entry = play.stage, f"payments:{file}"
    stage.say(f"import_payments('{file}') runs in {victim}; a duplicate waits")
    send(file, _FOR_EVER)
    holder = play.until_begun(entry)
    send_duplicate(file, 0.7)
    play.until_waited_for(holder)
    stage.play_for(_MEANWHILE)
    stage.send_signal(signal.SIGKILL, "killed", holder)
    taker = play.until_begun(entry, 2)
    play.until_ended(entry)

    (killed,) = of_kind(stage.moments(), "killed", holder.lease)
    took, name = taker.began - killed.at, victim.rpartition(" ")[2]
    # Where no death can be proven, the lease has to run out.
    limit = AT_ONCE if this_process().identity else TTL + 1
    stage.check(
        f"{taker.worker} took over {took:.2f} s after the kill; the ledger has 1 write",
        shown=took <= limit
        and taker.lease == holder.lease
        and taker.fence > holder.fence
        and play.ledger.look(entry)[:2] == ("imported", 1),
        headline=f"{name} killed: taken over in {took:.2f} s",
    )


def deploy(play: Play) -> None:
    """A rolling deploy in a long job: nothing runs twice, nothing is lost."""
    stage, entry = play.stage, "statements:2026-01"
    stage.say(f"build_statements('2026-01') to {OLD}, and meanwhile {NEW} starts")
    built = [app.build_statements.apply_async(("2026-01",), queue=OLD)]
    first = play.until_begun(entry)
    play.crew.start_celery(NEW)
    stage.say("3 x issue_invoice, of different invoices, to whoever takes them")
    issued = [app.issue_invoice.delay(number, seconds=0.3) for number in DEPLOYED[:3]]
    play.crew.until_ready(stage, NEW)
    play.crew.stop(OLD)
    stage.say(f"a duplicate to {NEW}, and 3 more invoices to whoever takes them")
    built.append(app.build_statements.apply_async(("2026-01",), queue=NEW))
    issued += [app.issue_invoice.delay(number, seconds=0.3) for number in DEPLOYED[3:]]
    play.until_waited_for(first)
    stage.play_for(1.5 * TTL)
    stage.say("the last figures of the month are in, so the long job can end")
    play.ledger.put("figures:2026-01", "final")
    code = play.crew.until_gone(stage, OLD)
    _check_statements(play, code, play.until_stored(built))
    _check_invoices(play, play.until_stored(issued))


def _check_statements(play: Play, code: int, outcomes: list[Any]) -> None:
    runs = play.runs("statements:2026-01")
    (stopping,) = of_kind(play.stage.moments(), "stopping")
    play.stage.check(
        f"{OLD} finished its job and ended; the duplicate waited at {NEW}, "
        "and found the statements built",
        shown=[run.worker for run in runs] == [OLD, NEW]
        and runs[0].began < stopping.at < runs[0].ended
        and take_turns(runs)
        and (code, outcomes) == (0, ["built", "was done before"])
        and play.ledger.look("statements:2026-01").writes == 1,
        headline="the duplicate waits, nothing runs twice",
    )


def _check_invoices(play: Play, results: list[Any]) -> None:
    entries = [f"invoice:{number}" for number in DEPLOYED]
    once = all(len(play.runs(e)) == play.ledger.look(e).writes == 1 for e in entries)
    play.stage.check(
        "all 6 invoices that came meanwhile were issued, each once",
        shown=once and results == ["issued"] * len(DEPLOYED),
        headline="nothing is lost: 6 of 6 others done",
    )


def pause(play: Play) -> None:
    """The holder is paused past its TTL: told when it wakes, and refused."""
    stage, entry = play.stage, "invoice:2077"
    stage.say(f"settle_invoice(2077) to {OTHER}; a duplicate waits")
    sent = app.settle_invoice.apply_async((2077, _FOR_EVER), queue=OTHER)
    holder = play.until_begun(entry)
    other = NEW if play.crew.is_there(NEW) else OLD
    app.settle_invoice.apply_async((2077, 0.8), queue=other)
    play.until_waited_for(holder)
    stage.play_for(_MEANWHILE)
    stage.send_signal(signal.SIGSTOP, "paused", holder)
    taker = play.until_begun(entry, 2)
    play.until_ended(entry)
    stage.send_signal(signal.SIGCONT, "resumed", holder)
    told = play.until_kind("told", holder)
    refused = play.until_kind("refused", holder)
    (outcome,) = play.until_stored([sent])
    stage.play_for(_MEANWHILE)

    moments = stage.moments()
    (stopped,) = of_kind(moments, "paused", holder.lease)
    (woken,) = of_kind(moments, "resumed", holder.lease)
    took, late = taker.began - stopped.at, told.at - woken.at
    told_after = f"{late * 1000:.0f} ms after it woke"
    stage.check(
        f"{taker.worker} took over {took:.1f} s after the pause began; the paused task "
        f"was told {told_after}, and is no success",
        shown=stopped.at < taker.began < woken.at
        and took <= TTL + 1
        and late <= AT_ONCE
        and isinstance(outcome, LeaseLost),
        headline=f"taken over after {took:.1f} s; told {told_after}",
    )
    stage.check(
        "its late write was refused: the ledger has the newer fence, and one write",
        shown=(refused.fence, refused.other_fence) == (holder.fence, taker.fence)
        and taker.fence > holder.fence
        and play.ledger.look(entry) == ("settled", 1, taker.fence),
        headline="its late write is refused",
    )


def _skipped(results: list[Any]) -> list[Any]:
    return [r for r in results if isinstance(r, dict) and r.get("skipped")]


SCENES = (
    (
        "Five duplicates sent together: one runs, the others do what their policy says",
        duplicates,
    ),
    ("A job of three TTLs: it keeps its lease", long_job),
    ("kill -9 of the holder: it is taken over in mid-task", kill),
    ("A rolling deploy in a long job: nothing runs twice, nothing is lost", deploy),
    (
        "The holder is paused past its TTL: it is told, and its late write refused",
        pause,
    ),
)


def start_workers(play: Play) -> None:
    """Start the workers with which a demo begins."""
    play.crew.start_celery(OLD)
    play.crew.start_celery(OTHER)
    play.crew.start_rq(RQ)
    play.crew.until_ready(play.stage, OLD, OTHER, RQ)
