from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HashAlgorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HASH_ALGORITHM_UNSPECIFIED: _ClassVar[HashAlgorithm]
    HASH_ALGORITHM_SHA256: _ClassVar[HashAlgorithm]
    HASH_ALGORITHM_XXH3: _ClassVar[HashAlgorithm]

class PrefixIndex(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_INDEX_UNSPECIFIED: _ClassVar[PrefixIndex]
    PREFIX_INDEX_HASH: _ClassVar[PrefixIndex]
    PREFIX_INDEX_RADIX: _ClassVar[PrefixIndex]
    PREFIX_INDEX_NONE: _ClassVar[PrefixIndex]

class EvictionPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVICTION_POLICY_UNSPECIFIED: _ClassVar[EvictionPolicy]
    EVICTION_POLICY_ADAPTIVE: _ClassVar[EvictionPolicy]
    EVICTION_POLICY_LRU: _ClassVar[EvictionPolicy]
HASH_ALGORITHM_UNSPECIFIED: HashAlgorithm
HASH_ALGORITHM_SHA256: HashAlgorithm
HASH_ALGORITHM_XXH3: HashAlgorithm
PREFIX_INDEX_UNSPECIFIED: PrefixIndex
PREFIX_INDEX_HASH: PrefixIndex
PREFIX_INDEX_RADIX: PrefixIndex
PREFIX_INDEX_NONE: PrefixIndex
EVICTION_POLICY_UNSPECIFIED: EvictionPolicy
EVICTION_POLICY_ADAPTIVE: EvictionPolicy
EVICTION_POLICY_LRU: EvictionPolicy

class PoolSpec(_message.Message):
    __slots__ = ("num_blocks", "block_size", "bytes_per_block", "model_fingerprint", "hash_algorithm", "prefix_index", "eviction_policy")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    PREFIX_INDEX_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    bytes_per_block: int
    model_fingerprint: str
    hash_algorithm: HashAlgorithm
    prefix_index: PrefixIndex
    eviction_policy: EvictionPolicy
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., hash_algorithm: _Optional[_Union[HashAlgorithm, str]] = ..., prefix_index: _Optional[_Union[PrefixIndex, str]] = ..., eviction_policy: _Optional[_Union[EvictionPolicy, str]] = ...) -> None: ...

class Occupancy(_message.Message):
    __slots__ = ("usable_blocks", "free_blocks", "cached_blocks", "held_blocks", "shared_blocks", "stored_tokens", "reserved_tokens", "sequences", "pinned_blocks", "leased_blocks")
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    usable_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    shared_blocks: int
    stored_tokens: int
    reserved_tokens: int
    sequences: int
    pinned_blocks: int
    leased_blocks: int
    def __init__(self, usable_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., stored_tokens: _Optional[int] = ..., reserved_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("allocated_blocks", "freed_blocks", "evicted_blocks", "forks", "copies", "queried_tokens", "hit_tokens", "allocation_failures", "unknown_frees", "reused_blocks", "removed_blocks", "quota_failures", "pin_failures")
    ALLOCATED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_FAILURES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FREES_FIELD_NUMBER: _ClassVar[int]
    REUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PIN_FAILURES_FIELD_NUMBER: _ClassVar[int]
    allocated_blocks: int
    freed_blocks: int
    evicted_blocks: int
    forks: int
    copies: int
    queried_tokens: int
    hit_tokens: int
    allocation_failures: int
    unknown_frees: int
    reused_blocks: int
    removed_blocks: int
    quota_failures: int
    pin_failures: int
    def __init__(self, allocated_blocks: _Optional[int] = ..., freed_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., forks: _Optional[int] = ..., copies: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., allocation_failures: _Optional[int] = ..., unknown_frees: _Optional[int] = ..., reused_blocks: _Optional[int] = ..., removed_blocks: _Optional[int] = ..., quota_failures: _Optional[int] = ..., pin_failures: _Optional[int] = ...) -> None: ...

class RecentLookups(_message.Message):
    __slots__ = ("lookups", "queried_tokens", "hit_tokens")
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lookups: int
    queried_tokens: int
    hit_tokens: int
    def __init__(self, lookups: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class CacheScope(_message.Message):
    __slots__ = ("adapter_id", "adapter_version", "salt")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    adapter_version: str
    salt: str
    def __init__(self, adapter_id: _Optional[str] = ..., adapter_version: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class ContentSpan(_message.Message):
    __slots__ = ("content_id", "offset", "length")
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    content_id: str
    offset: int
    length: int
    def __init__(self, content_id: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("priority", "pin_seconds")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    priority: int
    pin_seconds: float
    def __init__(self, priority: _Optional[int] = ..., pin_seconds: _Optional[float] = ...) -> None: ...

class OpenPoolRequest(_message.Message):
    __slots__ = ("pool_id", "spec", "runner_id")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    spec: PoolSpec
    runner_id: str
    def __init__(self, pool_id: _Optional[str] = ..., spec: _Optional[_Union[PoolSpec, _Mapping]] = ..., runner_id: _Optional[str] = ...) -> None: ...

class OpenPoolResponse(_message.Message):
    __slots__ = ("boot_id", "epoch", "created", "occupancy")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    epoch: int
    created: bool
    occupancy: Occupancy
    def __init__(self, boot_id: _Optional[str] = ..., epoch: _Optional[int] = ..., created: _Optional[bool] = ..., occupancy: _Optional[_Union[Occupancy, _Mapping]] = ...) -> None: ...

class ClosePoolRequest(_message.Message):
    __slots__ = ("pool_id", "epoch")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    epoch: int
    def __init__(self, pool_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ClosePoolResponse(_message.Message):
    __slots__ = ("closed_sequences",)
    CLOSED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    closed_sequences: int
    def __init__(self, closed_sequences: _Optional[int] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("pool_id", "epoch", "sequence_id", "token_ids", "scope", "headroom_blocks", "skip_cache_read", "resumed", "spans", "retention", "lookahead_tokens", "promised_tokens", "skip_cache_write")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SKIP_CACHE_READ_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_CACHE_WRITE_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    epoch: int
    sequence_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    scope: CacheScope
    headroom_blocks: int
    skip_cache_read: bool
    resumed: bool
    spans: _containers.RepeatedCompositeFieldContainer[ContentSpan]
    retention: Retention
    lookahead_tokens: int
    promised_tokens: int
    skip_cache_write: bool
    def __init__(self, pool_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., scope: _Optional[_Union[CacheScope, _Mapping]] = ..., headroom_blocks: _Optional[int] = ..., skip_cache_read: _Optional[bool] = ..., resumed: _Optional[bool] = ..., spans: _Optional[_Iterable[_Union[ContentSpan, _Mapping]]] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., lookahead_tokens: _Optional[int] = ..., promised_tokens: _Optional[int] = ..., skip_cache_write: _Optional[bool] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("block_ids", "cached_tokens", "occupancy", "copies")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    occupancy: Occupancy
    copies: _containers.RepeatedCompositeFieldContainer[BlockCopy]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ..., occupancy: _Optional[_Union[Occupancy, _Mapping]] = ..., copies: _Optional[_Iterable[_Union[BlockCopy, _Mapping]]] = ...) -> None: ...

class SequenceAppend(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "computed_tokens", "lookahead_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    computed_tokens: int
    lookahead_tokens: int
    def __init__(self, sequence_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., computed_tokens: _Optional[int] = ..., lookahead_tokens: _Optional[int] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("pool_id", "epoch", "appends")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    APPENDS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    epoch: int
    appends: _containers.RepeatedCompositeFieldContainer[SequenceAppend]
    def __init__(self, pool_id: _Optional[str] = ..., epoch: _Optional[int] = ..., appends: _Optional[_Iterable[_Union[SequenceAppend, _Mapping]]] = ...) -> None: ...

class BlockCopy(_message.Message):
    __slots__ = ("source_block_id", "target_block_id", "num_tokens")
    SOURCE_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source_block_id: int
    target_block_id: int
    num_tokens: int
    def __init__(self, source_block_id: _Optional[int] = ..., target_block_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class SequenceGrant(_message.Message):
    __slots__ = ("sequence_id", "first_index", "block_ids", "copies")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    first_index: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    copies: _containers.RepeatedCompositeFieldContainer[BlockCopy]
    def __init__(self, sequence_id: _Optional[str] = ..., first_index: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., copies: _Optional[_Iterable[_Union[BlockCopy, _Mapping]]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("grants", "occupancy")
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[SequenceGrant]
    occupancy: Occupancy
    def __init__(self, grants: _Optional[_Iterable[_Union[SequenceGrant, _Mapping]]] = ..., occupancy: _Optional[_Union[Occupancy, _Mapping]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("pool_id", "epoch", "parent_id", "child_ids")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_IDS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    epoch: int
    parent_id: str
    child_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pool_id: _Optional[str] = ..., epoch: _Optional[int] = ..., parent_id: _Optional[str] = ..., child_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("block_ids", "occupancy")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    occupancy: Occupancy
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., occupancy: _Optional[_Union[Occupancy, _Mapping]] = ...) -> None: ...

class FreeRequest(_message.Message):
    __slots__ = ("pool_id", "epoch", "sequences", "preempted")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    epoch: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceAppend]
    preempted: bool
    def __init__(self, pool_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceAppend, _Mapping]]] = ..., preempted: _Optional[bool] = ...) -> None: ...

class FreeResponse(_message.Message):
    __slots__ = ("freed_sequences", "unknown_sequences", "occupancy")
    FREED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    freed_sequences: int
    unknown_sequences: int
    occupancy: Occupancy
    def __init__(self, freed_sequences: _Optional[int] = ..., unknown_sequences: _Optional[int] = ..., occupancy: _Optional[_Union[Occupancy, _Mapping]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("pool_id", "token_ids", "scope", "spans")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    scope: CacheScope
    spans: _containers.RepeatedCompositeFieldContainer[ContentSpan]
    def __init__(self, pool_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., scope: _Optional[_Union[CacheScope, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[ContentSpan, _Mapping]]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("cached_tokens", "block_ids", "partial_block_id")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    partial_block_id: int
    def __init__(self, cached_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., partial_block_id: _Optional[int] = ...) -> None: ...

class GetBlockTableRequest(_message.Message):
    __slots__ = ("pool_id", "sequence_id")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    sequence_id: str
    def __init__(self, pool_id: _Optional[str] = ..., sequence_id: _Optional[str] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("block_id", "reference_count", "block_hash", "stored_tokens")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    reference_count: int
    block_hash: bytes
    stored_tokens: int
    def __init__(self, block_id: _Optional[int] = ..., reference_count: _Optional[int] = ..., block_hash: _Optional[bytes] = ..., stored_tokens: _Optional[int] = ...) -> None: ...

class SequenceInfo(_message.Message):
    __slots__ = ("sequence_id", "num_tokens", "computed_tokens", "cached_tokens", "num_blocks")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    num_tokens: int
    computed_tokens: int
    cached_tokens: int
    num_blocks: int
    def __init__(self, sequence_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class GetBlockTableResponse(_message.Message):
    __slots__ = ("sequence", "blocks")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceInfo
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    def __init__(self, sequence: _Optional[_Union[SequenceInfo, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("pool_id", "page_size", "page_token")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    page_size: int
    page_token: str
    def __init__(self, pool_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences", "next_page_token")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    next_page_token: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetPoolRequest(_message.Message):
    __slots__ = ("pool_id",)
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    def __init__(self, pool_id: _Optional[str] = ...) -> None: ...

class GetPoolResponse(_message.Message):
    __slots__ = ("pool_id", "spec", "boot_id", "epoch", "occupancy", "totals", "recent_lookups")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    RECENT_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    spec: PoolSpec
    boot_id: str
    epoch: int
    occupancy: Occupancy
    totals: Totals
    recent_lookups: RecentLookups
    def __init__(self, pool_id: _Optional[str] = ..., spec: _Optional[_Union[PoolSpec, _Mapping]] = ..., boot_id: _Optional[str] = ..., epoch: _Optional[int] = ..., occupancy: _Optional[_Union[Occupancy, _Mapping]] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., recent_lookups: _Optional[_Union[RecentLookups, _Mapping]] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("pool_id", "epoch", "sequence_id", "num_tokens")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    epoch: int
    sequence_id: str
    num_tokens: int
    def __init__(self, pool_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence_id: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TruncateResponse(_message.Message):
    __slots__ = ("dropped_blocks", "occupancy")
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    dropped_blocks: int
    occupancy: Occupancy
    def __init__(self, dropped_blocks: _Optional[int] = ..., occupancy: _Optional[_Union[Occupancy, _Mapping]] = ...) -> None: ...

class RemovePrefixRequest(_message.Message):
    __slots__ = ("pool_id", "epoch", "token_ids", "scope", "spans")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    scope: CacheScope
    spans: _containers.RepeatedCompositeFieldContainer[ContentSpan]
    def __init__(self, pool_id: _Optional[str] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., scope: _Optional[_Union[CacheScope, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[ContentSpan, _Mapping]]] = ...) -> None: ...

class RemovePrefixResponse(_message.Message):
    __slots__ = ("removed_blocks", "held_blocks")
    REMOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    removed_blocks: int
    held_blocks: int
    def __init__(self, removed_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("pool_id", "salt", "every_salt", "max_blocks")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    EVERY_SALT_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    salt: str
    every_salt: bool
    max_blocks: int
    def __init__(self, pool_id: _Optional[str] = ..., salt: _Optional[str] = ..., every_salt: _Optional[bool] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTenantRequest(_message.Message):
    __slots__ = ("pool_id", "salt")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    salt: str
    def __init__(self, pool_id: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class GetTenantResponse(_message.Message):
    __slots__ = ("quota_blocks", "held_blocks", "cached_blocks")
    QUOTA_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    quota_blocks: int
    held_blocks: int
    cached_blocks: int
    def __init__(self, quota_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("pool_id", "from_number", "boot_id")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    from_number: int
    boot_id: str
    def __init__(self, pool_id: _Optional[str] = ..., from_number: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("boot_id", "number", "stored", "removed", "cleared", "snapshot")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    number: int
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: CacheCleared
    snapshot: IndexSnapshot
    def __init__(self, boot_id: _Optional[str] = ..., number: _Optional[int] = ..., stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ..., snapshot: _Optional[_Union[IndexSnapshot, _Mapping]] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("block_hashes", "parent_hash", "adapter_id", "adapter_version")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent_hash: bytes
    adapter_id: str
    adapter_version: str
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., parent_hash: _Optional[bytes] = ..., adapter_id: _Optional[str] = ..., adapter_version: _Optional[str] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IndexSnapshot(_message.Message):
    __slots__ = ("first", "last", "stored")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    first: bool
    last: bool
    stored: _containers.RepeatedCompositeFieldContainer[BlocksStored]
    def __init__(self, first: _Optional[bool] = ..., last: _Optional[bool] = ..., stored: _Optional[_Iterable[_Union[BlocksStored, _Mapping]]] = ...) -> None: ...

class ResetCacheRequest(_message.Message):
    __slots__ = ("pool_id", "epoch")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    epoch: int
    def __init__(self, pool_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ResetCacheResponse(_message.Message):
    __slots__ = ("forgotten_blocks",)
    FORGOTTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    forgotten_blocks: int
    def __init__(self, forgotten_blocks: _Optional[int] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ("pool_id",)
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    def __init__(self, pool_id: _Optional[str] = ...) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("ok", "violations", "checked_blocks", "checked_sequences")
    OK_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    violations: _containers.RepeatedScalarFieldContainer[str]
    checked_blocks: int
    checked_sequences: int
    def __init__(self, ok: _Optional[bool] = ..., violations: _Optional[_Iterable[str]] = ..., checked_blocks: _Optional[int] = ..., checked_sequences: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "holdings", "step")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    open: SessionOpen
    holdings: Holdings
    step: SessionStep
    def __init__(self, open: _Optional[_Union[SessionOpen, _Mapping]] = ..., holdings: _Optional[_Union[Holdings, _Mapping]] = ..., step: _Optional[_Union[SessionStep, _Mapping]] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("pool_id", "spec", "runner_id", "lease_blocks", "restores")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    spec: PoolSpec
    runner_id: str
    lease_blocks: int
    restores: bool
    def __init__(self, pool_id: _Optional[str] = ..., spec: _Optional[_Union[PoolSpec, _Mapping]] = ..., runner_id: _Optional[str] = ..., lease_blocks: _Optional[int] = ..., restores: _Optional[bool] = ...) -> None: ...

class Holdings(_message.Message):
    __slots__ = ("sequences", "lease_block_ids", "cached", "last")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[HeldSequence]
    lease_block_ids: bytes
    cached: _containers.RepeatedCompositeFieldContainer[CachedBlocks]
    last: bool
    def __init__(self, sequences: _Optional[_Iterable[_Union[HeldSequence, _Mapping]]] = ..., lease_block_ids: _Optional[bytes] = ..., cached: _Optional[_Iterable[_Union[CachedBlocks, _Mapping]]] = ..., last: _Optional[bool] = ...) -> None: ...

class HeldSequence(_message.Message):
    __slots__ = ("sequence_id", "handle", "token_ids", "block_ids", "computed_tokens", "cached_tokens", "scope", "retention", "prompt_tokens", "promised_tokens", "skip_cache_write")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_CACHE_WRITE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    handle: int
    token_ids: bytes
    block_ids: bytes
    computed_tokens: int
    cached_tokens: int
    scope: CacheScope
    retention: Retention
    prompt_tokens: int
    promised_tokens: int
    skip_cache_write: bool
    def __init__(self, sequence_id: _Optional[str] = ..., handle: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., scope: _Optional[_Union[CacheScope, _Mapping]] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., promised_tokens: _Optional[int] = ..., skip_cache_write: _Optional[bool] = ...) -> None: ...

class CachedBlocks(_message.Message):
    __slots__ = ("scope", "block_ids", "parent_block_ids", "token_ids")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    scope: CacheScope
    block_ids: bytes
    parent_block_ids: bytes
    token_ids: bytes
    def __init__(self, scope: _Optional[_Union[CacheScope, _Mapping]] = ..., block_ids: _Optional[bytes] = ..., parent_block_ids: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class SessionStep(_message.Message):
    __slots__ = ("epoch", "number", "orders", "returned_block_ids", "lease_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    orders: _containers.RepeatedCompositeFieldContainer[SessionOrder]
    returned_block_ids: bytes
    lease_blocks: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., orders: _Optional[_Iterable[_Union[SessionOrder, _Mapping]]] = ..., returned_block_ids: _Optional[bytes] = ..., lease_blocks: _Optional[int] = ...) -> None: ...

class SessionOrder(_message.Message):
    __slots__ = ("progress", "end", "admit", "fork", "truncate")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    end: EndOrder
    admit: AdmitOrder
    fork: ForkOrder
    truncate: TruncateOrder
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., end: _Optional[_Union[EndOrder, _Mapping]] = ..., admit: _Optional[_Union[AdmitOrder, _Mapping]] = ..., fork: _Optional[_Union[ForkOrder, _Mapping]] = ..., truncate: _Optional[_Union[TruncateOrder, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("handles", "token_counts", "computed_tokens", "taken_counts", "asks", "token_ids", "taken_block_ids", "table_counts")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    token_counts: bytes
    computed_tokens: bytes
    taken_counts: bytes
    asks: bytes
    token_ids: bytes
    taken_block_ids: bytes
    table_counts: bytes
    def __init__(self, handles: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., computed_tokens: _Optional[bytes] = ..., taken_counts: _Optional[bytes] = ..., asks: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., taken_block_ids: _Optional[bytes] = ..., table_counts: _Optional[bytes] = ...) -> None: ...

class EndOrder(_message.Message):
    __slots__ = ("progress", "preempted")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    preempted: bool
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., preempted: _Optional[bool] = ...) -> None: ...

class AdmitOrder(_message.Message):
    __slots__ = ("sequence_id", "handle", "token_ids", "scope", "headroom_blocks", "skip_cache_read", "resumed", "retention", "promised_tokens", "skip_cache_write")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SKIP_CACHE_READ_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    PROMISED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_CACHE_WRITE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    handle: int
    token_ids: bytes
    scope: CacheScope
    headroom_blocks: int
    skip_cache_read: bool
    resumed: bool
    retention: Retention
    promised_tokens: int
    skip_cache_write: bool
    def __init__(self, sequence_id: _Optional[str] = ..., handle: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., scope: _Optional[_Union[CacheScope, _Mapping]] = ..., headroom_blocks: _Optional[int] = ..., skip_cache_read: _Optional[bool] = ..., resumed: _Optional[bool] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., promised_tokens: _Optional[int] = ..., skip_cache_write: _Optional[bool] = ...) -> None: ...

class ForkOrder(_message.Message):
    __slots__ = ("parent_handle", "child_ids", "child_handles")
    PARENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    CHILD_IDS_FIELD_NUMBER: _ClassVar[int]
    CHILD_HANDLES_FIELD_NUMBER: _ClassVar[int]
    parent_handle: int
    child_ids: _containers.RepeatedScalarFieldContainer[str]
    child_handles: bytes
    def __init__(self, parent_handle: _Optional[int] = ..., child_ids: _Optional[_Iterable[str]] = ..., child_handles: _Optional[bytes] = ...) -> None: ...

class TruncateOrder(_message.Message):
    __slots__ = ("handle", "num_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_tokens: int
    def __init__(self, handle: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("opened", "answer", "gap")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    answer: SessionAnswer
    gap: SessionGap
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., answer: _Optional[_Union[SessionAnswer, _Mapping]] = ..., gap: _Optional[_Union[SessionGap, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("boot_id", "epoch", "lease_block_ids", "silence_seconds")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    epoch: int
    lease_block_ids: bytes
    silence_seconds: float
    def __init__(self, boot_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_block_ids: _Optional[bytes] = ..., silence_seconds: _Optional[float] = ...) -> None: ...

class SessionAnswer(_message.Message):
    __slots__ = ("number", "grants", "admitted", "refusals", "lease_block_ids", "forgotten_block_ids")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    LEASE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    grants: Grants
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    lease_block_ids: bytes
    forgotten_block_ids: bytes
    def __init__(self, number: _Optional[int] = ..., grants: _Optional[_Union[Grants, _Mapping]] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., lease_block_ids: _Optional[bytes] = ..., forgotten_block_ids: _Optional[bytes] = ...) -> None: ...

class Grants(_message.Message):
    __slots__ = ("handles", "first_indices", "counts", "block_ids", "copies")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDICES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    first_indices: bytes
    counts: bytes
    block_ids: bytes
    copies: _containers.RepeatedCompositeFieldContainer[BlockCopy]
    def __init__(self, handles: _Optional[bytes] = ..., first_indices: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., copies: _Optional[_Iterable[_Union[BlockCopy, _Mapping]]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("handle", "block_ids", "cached_tokens", "copies")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    block_ids: bytes
    cached_tokens: int
    copies: _containers.RepeatedCompositeFieldContainer[BlockCopy]
    def __init__(self, handle: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[BlockCopy, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("handle", "reason", "sentence")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: str
    sentence: str
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[str] = ..., sentence: _Optional[str] = ...) -> None: ...

class SessionGap(_message.Message):
    __slots__ = ("expected_number",)
    EXPECTED_NUMBER_FIELD_NUMBER: _ClassVar[int]
    expected_number: int
    def __init__(self, expected_number: _Optional[int] = ...) -> None: ...
