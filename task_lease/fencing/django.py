"""Guard rows of Django models: a mixin, and a method of its queryset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections, models
from typing_extensions import Self

from task_lease.errors import InvalidConfig, StaleFence
from task_lease.fencing.fenced import fence_of

if TYPE_CHECKING:
    from task_lease.fencing.fenced import Fenced


class FencedQuerySet(models.QuerySet):  # type: ignore[misc]  # Django has no types
    """A queryset whose rows can be claimed."""

    def claim(self, lease: Fenced) -> Self:
        """Return the same rows, claimed until the transaction ends.

        It must be the transaction's first statement, so that all is read after it.

        Args:
            lease: Who wants to write; a run without a fence is always refused.

        Raises:
            InvalidConfig: If it is not inside ``transaction.atomic()``.
            StaleFence: If a row has seen a higher fence, or there is no such row.
        """
        table = self.model._meta.db_table  # noqa: SLF001 - Django's documented name
        fence = fence_of(lease, table)
        # `update` writes, so it must ask where writes go.
        rows: Any = self.using(self._writes_to())
        ours = models.Q(lock_version=fence, lock_owner=lease.owner)
        unseen = models.Q(lock_version=None) | models.Q(lock_version__lt=fence)
        found = rows.filter(unseen | ours).update(
            lock_version=fence, lock_owner=lease.owner
        )
        # Also a row that came between the two statements was not claimed.
        others = rows.exclude(ours).values_list("lock_version", flat=True)
        refused = list(others[:1])
        if refused or not (found or rows.exists()):
            raise StaleFence(table, fence, refused[0] if refused else None)
        claimed: Self = rows.all()
        return claimed

    def claim_or_create(self, lease: Fenced, **key: object) -> Self:
        """Return a row, claimed, that is created if it is not there.

        With a model of guard rows, one for each lease's name, it claims what no row
        of its own can guard: inserts, deletes, and whatever a statement may reach.

        Args:
            lease: Who wants to write.
            **key: The row's unique field and its value.

        Raises:
            InvalidConfig: If it is not inside ``transaction.atomic()``.
            StaleFence: If the row has seen a higher fence.
        """
        fence_of(lease, self.model._meta.db_table)  # noqa: SLF001 - as above
        rows: Any = self.using(self._writes_to())
        rows.bulk_create([self.model(**key)], ignore_conflicts=True)
        claimed: Self = rows.filter(**key).claim(lease)
        return claimed

    def _writes_to(self) -> str:
        self._for_write = True
        alias: str = self.db
        if not connections[alias].in_atomic_block:
            rule = "must be inside transaction.atomic() to claim"
            raise InvalidConfig("database", alias, rule)
        return alias


class FencedModel(models.Model):  # type: ignore[misc]  # Django has no types
    """A model whose rows know the highest fence that they have seen, and whose.

    Example:
        >>> with transaction.atomic():  # doctest: +SKIP
        ...     invoice = Invoice.objects.filter(pk=42).claim(lease).get()
        ...     # what was read before the claim must not be written
    """

    lock_version = models.BigIntegerField(null=True, default=None, editable=False)
    lock_owner = models.CharField(  # noqa: DJ001 - NULL: never claimed
        max_length=64, null=True, default=None, editable=False
    )

    objects = FencedQuerySet.as_manager()

    class Meta:
        """No table of its own."""

        abstract = True
