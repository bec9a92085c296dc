"""Tokens: who may call this service. The secret of a token is shown once, when it is created."""

from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct, structs

from holdfast.core.access import PREFIX, AccessToken, read_token
from holdfast.errors import InvalidInput, NotAuthenticated, NotFound, NotPermitted
from holdfast.service.auth.roles import ADMIN, ROLES, Role, Scope
from holdfast.service.auth.tokens import TokenAccess, make_token, revoke_token
from holdfast.service.context import RequestContext
from holdfast.service.paging import Cursor, PageSize, read_page
from holdfast.service.registry import Name, Request, operation
from holdfast.service.views import shown
from holdfast.store.queries import TokenQuery

Place = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class TokenView(Struct, frozen=True, kw_only=True):
    """What is known of a token. It begins with `prefix`; `last_used_at` is right within some minutes."""

    token_id: str
    prefix: str
    name: str
    role: str
    scopes: tuple[str, ...]
    roles: tuple[str, ...]
    tenant: str | None
    project: str | None
    environment: str | None
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str
    last_used_at: datetime | None
    session_of: str | None
    is_valid: bool


async def _view(context: RequestContext, token: AccessToken) -> TokenView:
    now = await context.runtime.store.now()
    return shown(TokenView, token, prefix=f"{PREFIX}{token.token_id}", is_valid=token.is_valid(now))


class CreateToken(Request, frozen=True, kw_only=True):
    """Who gets a token, and what it is good for: a role, or scopes, or both. `roles` are the bearer's for tasks.

    Without a tenant it is for the tenant of the caller; if the caller sees all tenants, so does it.
    """

    name: Name
    role: Annotated[Role, Meta(description="What it may do in the service, as a set of scopes.")] | None = None
    scopes: Annotated[
        tuple[Scope, ...], Meta(max_length=50, description="What it may do besides, such as runs:read.")
    ] = ()
    roles: Annotated[
        tuple[Name, ...], Meta(max_length=100, description="The bearer's roles for human tasks, such as manager.")
    ] = ()
    tenant: Place | None = None
    project: Place | None = None
    environment: Place | None = None
    expires_in_s: (
        Annotated[int, Meta(ge=1, lt=2**36, description="Else 90 days, if the service says no other.")] | None
    ) = None


class MadeToken(Struct, frozen=True):
    """The token, which is shown only once, and its record."""

    token: str
    item: TokenView


@operation("tokens.create", "POST /v1/tokens", scope=ADMIN, status=201, audit="its commit")
async def create(context: RequestContext, request: CreateToken) -> MadeToken:
    """Create a token. Only its hash is stored: a lost token has to be replaced."""
    if request.role is None and not request.scopes:
        raise InvalidInput(f"role: a token needs a role ({', '.join(ROLES)}), or scopes", field="role")
    principal, options = context.principal, context.service.options
    text, token = await make_token(
        context.store,
        request.name,
        role=request.role or "",
        scopes=request.scopes,
        roles=request.roles,
        tenant=_within("tenant", principal.tenant, request.tenant),
        project=_within("project", principal.project, request.project),
        environment=_within("environment", principal.environment, request.environment),
        expires_in_s=min(options.token_s, options.longest_token_s)
        if request.expires_in_s is None
        else request.expires_in_s,
        longest_s=options.longest_token_s,
        created_by=principal.token_id or principal.name,
        audit=context.audit(),
    )
    await _refuse_revoked_maker(context, token)
    return MadeToken(text, await _view(context, token))


async def _refuse_revoked_maker(context: RequestContext, made: AccessToken) -> None:
    """Revoke a new token if the token of its maker was revoked in another process, which this one may not know yet.

    A caller who revokes with descendants first revokes the maker, and then looks for the tokens that it made. Either
    that search finds this token, or this function finds that the maker is revoked.
    """
    makers = await context.runtime.store.find_tokens(TokenQuery(token_ids=(made.created_by,)))
    if any(maker.revoked_at is not None for maker in makers):
        await revoke_token(context.store, made, context.principal.name, context.audit())
        raise NotAuthenticated("this token is not valid: it is unknown, revoked or expired")


def _within(field: str, bound: str | None, asked: str | None) -> str | None:
    if bound is not None and asked not in (None, bound):
        raise NotPermitted(f"{field}: tokens that you create are for {bound!r}", field=field)
    return asked if bound is None else bound


class ListTokens(Request, frozen=True, kw_only=True):
    """Which tokens to list: those of a tenant, and with `sessions` also the sessions of browsers."""

    tenant: str | None = None
    sessions: bool = False
    cursor: Cursor = ""
    limit: PageSize = 100


class TokenPage(Struct, frozen=True):
    """Some tokens. `next` is the cursor of the page behind it, if there is more."""

    items: list[TokenView]
    next: str | None = None


@operation("tokens.list", "GET /v1/tokens", scope=ADMIN)
async def list_(context: RequestContext, request: ListTokens) -> TokenPage:
    """Return tokens, including revoked ones, in the order of their ids. Secrets are not kept, so not shown."""
    _within("tenant", context.principal.tenant, request.tenant)
    rows, following = await read_page(
        context,
        "tokens",
        context.store.find_tokens,
        TokenQuery(tenant=request.tenant, sessions=request.sessions),
        lambda token: token.token_id,
        cursor=request.cursor,
        limit=request.limit,
    )
    return TokenPage([await _view(context, token) for token in rows], following)


Descendants = Annotated[bool, Meta(description="Also every token that was made with it, and with those, and so on.")]


class RevokeToken(Request, frozen=True, kw_only=True):
    """Which token is meant: the digits behind `holdfast_`, or both. Never the whole token: logs keep addresses."""

    token_id: Name
    descendants: Descendants = False


class RevokeLeaked(Request, frozen=True, kw_only=True):
    """The whole token, as it was found."""

    token: Annotated[str, Meta(min_length=1, max_length=200)]
    descendants: Descendants = True


class RevokedToken(TokenView, frozen=True, kw_only=True):
    """The token that is revoked. `descendants` are the ids of those that were revoked with it."""

    descendants: tuple[str, ...] = ()


@operation("tokens.revoke", "POST /v1/tokens/{token_id}/revoke", scope=ADMIN, errors=(NotFound,), audit="its commit")
async def revoke(context: RequestContext, request: RevokeToken) -> RevokedToken:
    """Revoke a token for good, with the sessions that were made from it. In other processes this takes two seconds."""
    token_id = request.token_id.removeprefix(PREFIX)
    if "_" in token_id:
        problem = "token_id: this is more than the id; revoke the token, whose secret is in logs now, by its id alone"
        raise InvalidInput(problem, field="token_id")
    return await _revoke(context, token_id, request.descendants)


@operation("tokens.revoke_leaked", "POST /v1/tokens/revoke-leaked", scope=ADMIN, errors=(NotFound,), audit="its commit")
async def revoke_leaked(context: RequestContext, request: RevokeLeaked) -> RevokedToken:
    """Revoke a leaked token, given by its full text, with all tokens that were created with it."""
    found = read_token(request.token.strip())
    if found is None:
        raise InvalidInput(
            f"token: this is not a token of Holdfast, which has {PREFIX}, 16 digits, _ and 72 digits", field="token"
        )
    return await _revoke(context, found[0], request.descendants)


async def _revoke(context: RequestContext, token_id: str, descendants: bool) -> RevokedToken:
    found = await context.store.find_tokens(TokenQuery(token_ids=(token_id,), sessions=True))
    if not found:
        raise NotFound(f"there is no token {token_id!r}", token_id=token_id)
    token = await revoke_token(context.store, found[0], context.principal.name, context.audit())
    gone: list[str] = []
    while descendants and (more := await _made_by(context, {token_id, *gone})):
        for each in more:
            await revoke_token(context.store, each, context.principal.name, context.audit())
            gone.append(each.token_id)
    access = context.service.authenticate
    if isinstance(access, TokenAccess):
        for each_id in (token_id, *gone):
            access.forget(each_id)
    view = await _view(context, token)
    return RevokedToken(**structs.asdict(view), descendants=tuple(gone))


async def _made_by(context: RequestContext, makers: set[str]) -> list[AccessToken]:
    """Return the tokens that were made with one of these and are not revoked."""
    made: list[AccessToken] = []
    query = TokenQuery(sessions=True, limit=500)
    while page := await context.store.find_tokens(query):
        made += [
            token
            for token in page
            if token.revoked_at is None and not makers.isdisjoint((token.created_by, token.session_of))
        ]
        query = structs.replace(query, after=page[-1].token_id)
    return made
