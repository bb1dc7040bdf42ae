// The docstrings of mycoll._C, in the form that docs/site/reference.py turns into docs/api.md. A
// test checks that those of public names explain all parameters. Names with an underscore are for
// the Python half.
#pragma once

namespace mycoll::doc {

inline constexpr const char* kNcclOptions = R"(How NCCL makes the communicators of one group.

`None`, or `""` for `net_name`, leaves the choice to NCCL and its variables, such as
NCCL_MAX_CTAS.)";
inline constexpr const char* kIsBlocking = R"(Whether calls into NCCL return only when their work is
enqueued. `None`: yes; no with an NCCL older than 2.28.7, in which a thread that hangs cannot be
released. NCCL_COMM_BLOCKING takes precedence.)";
inline constexpr const char* kMinCtas = "The smallest number of thread blocks for a collective.";
inline constexpr const char* kMaxCtas =
    "The largest number of thread blocks; fewer leave more of the GPU to your kernels.";
inline constexpr const char* kCgaClusterSize = "Thread blocks in a cluster.";
inline constexpr const char* kNvlsCtas = "Thread blocks for NVLink SHARP (NCCL 2.28).";
inline constexpr const char* kCtaPolicy = R"(What NCCL optimises for (2.27). 0: speed, 1: few thread
blocks, 2: none if copy engines can do the work.)";
inline constexpr const char* kTrafficClass = "The network's quality of service.";
inline constexpr const char* kNetName = "The network module, such as `Socket` or `IB`.";

inline constexpr const char* kOptions = R"(The options of one group: `pg_options` of
init_process_group and new_group. The group keeps a copy.

Example:
    options = mycoll.Options(timeout=timedelta(minutes=5))
    options.nccl.max_ctas = 4
    group = dist.new_group(backend="mycoll", pg_options=options)
)";
inline constexpr const char* kOptionsInit = R"(Makes options.

Args:
    timeout: The longest time that an operation may take; 30 minutes by default. A `timeout=` given
        to torch takes precedence.
    cpu: What carries CPU tensors: `"engine"` (mycoll's own), `"gloo"` (torch's), or `""` for the
        value of MYCOLL_CPU.
    shutdown_timeout: The longest time that `destroy_process_group()` waits for operations that are
        pending and for the other ranks; 10 seconds by default.
    warn_after: How long an operation waits before it logs the ranks that it waits for, and asks
        them whether they wait for each other; one second by default.

Raises:
    TypeError: There is no such option.
    ValueError: `cpu` has another value, or a time is negative.
)";
inline constexpr const char* kOptionsCpu = R"(What carries CPU tensors: `"engine"` (mycoll's own),
`"gloo"` (torch's), or `""` for the value of MYCOLL_CPU.)";
inline constexpr const char* kOptionsTimeout = R"(The longest time that an operation may take. A
`timeout=` given to torch takes precedence.)";
inline constexpr const char* kOptionsShutdownTimeout = R"(The longest time that
`destroy_process_group()` waits for operations that are pending and for the other ranks.)";
inline constexpr const char* kOptionsWarnAfter = R"(How long an operation waits before it logs the
ranks that it waits for, and asks them whether they wait for each other.)";
inline constexpr const char* kOptionsNccl = "How NCCL makes the communicators of this group.";
inline constexpr const char* kOptionsCopy = R"(Copies the options.

Returns:
    Options that can be changed independently.
)";
inline constexpr const char* kOptionsDeepCopy = R"(Copies the options.

Args:
    memo: Not used: options contain no Python objects.

Returns:
    Options that can be changed independently.
)";

inline constexpr const char* kArgumentError = R"(An argument was refused.

It is a ValueError and a RuntimeError: programs that are written for torch's own backends catch the
latter.)";

// mycoll.Endpoint and csrc/engine/endpoint.h explain these.
inline constexpr const char* kEndpoint = "The compiled half of mycoll.Endpoint, for any thread.";
inline constexpr const char* kEndpointInit = "Makes this process reachable for others.";
inline constexpr const char* kEndpointHandle = "The text that others need to reach this process.";
inline constexpr const char* kEndpointMismatch =
    R"(Returns why the process with this handle cannot be in a group with this one, whether it lives or
not: the settings in which the two differ. `""`: nothing prevents a group.)";
inline constexpr const char* kEndpointForm =
    "Makes a group of the processes with these handles, by rank, when all have called it.";
inline constexpr const char* kEndpointSend =
    R"(Sends a text to another process, where texts arrive in order. It is dropped if that has ended.
Raises ArgumentError if it is not a handle of this version of mycoll.)";
inline constexpr const char* kEndpointReceive =
    R"(Waits for a text, at most so long, or until a process that is watched ends. Returns the texts that
have arrived since the call before.)";
inline constexpr const char* kEndpointWatch =
    R"(Begins to watch these processes, for `loss_of()`. Those that a text is sent to are watched as
well. Raises as `send()`.)";
inline constexpr const char* kEndpointLossOf =
    R"(Returns how this process has detected that the other one has ended or cannot be reached; `""` if
it has not.)";

inline constexpr const char* kBackend = R"(One rank's end of a group.

init_process_group and new_group make it; `group._get_backend(device)` returns it.)";
inline constexpr const char* kBackendInit = R"(Joins a group. Returns when all ranks have joined.

Args:
    store: Where the ranks find each other.
    rank: This rank.
    size: The number of ranks.
    timeout: For joining, and for each operation.
    group_id: The name of the group, the same on all ranks.
    global_ranks: The ranks of the job that the group consists of, by rank.
    options: The group changes a copy of them; `None`: the defaults.
    has_device: Whether the group serves tensors on devices, too.
    of_job: Whether `global_ranks` are ranks of the job, as messages name them.
    shown: The options of the backend in whose place this one is; `None`: of no other.
    enable_reconfigure: Whether the group can get other ranks (torch 2.14 and later).

Raises:
    ArgumentError: An argument is wrong, or the ranks have been given different ones.
    DistBackendError: A rank has ended, or did not come in time.
)";
inline constexpr const char* kBackendOptions =
    "The options that the group uses: mycoll's, or those of the backend that mycoll replaces.";
inline constexpr const char* kBackendTransport = R"(Returns how this rank reaches the others.

Returns:
    `"shm"`, `"tcp"`, `"shm+tcp"`, or `"self"` for a group of one rank.
)";
inline constexpr const char* kBackendEncryption =
    R"(Returns how the bytes that this rank exchanges with other hosts are encrypted.

Returns:
    For example `"TLS 1.3 PSK, AES-128-GCM"`; `""` if they are not.
)";
inline constexpr const char* kBackendDiscard =
    R"(Aborts the group. Its ranks may be connected to again, even if this object is kept.)";

inline constexpr const char* kBackendDeviceTransport =
    R"(Returns how tensors on devices are transferred.

Returns:
    `"nccl"`, `"host"`, or `""` before the first call with such a tensor.
)";
inline constexpr const char* kBackendRegisterMemory =
    R"(Registers memory with NCCL's communicator on a device; `symmetric`: all ranks call this, in the
same order and with the same size. Does nothing without NCCL. Raises ArgumentError if the memory
is registered with other arguments, and DistBackendError if NCCL refuses it.)";
inline constexpr const char* kBackendDeregisterMemory =
    R"(Undoes `_register_memory()`. Raises ArgumentError if the memory is not registered.)";
inline constexpr const char* kBackendCommPtr =
    R"(Gives NCCL's communicator on the current device to libraries that call NCCL themselves.

Returns:
    The address of the ncclComm_t. It becomes invalid when the group is destroyed or fails.

Raises:
    ArgumentError: There is none: no collective has made it, or tensors travel through host memory.
)";
inline constexpr const char* kBackendSupportsWindow = "Whether `new_window()` can be called.";
inline constexpr const char* kBackendNewWindow = R"(Makes a window as mycoll.new_window() does.

Args:
    tensor: The memory that the others write to; `None`: Window.tensor_register() opens it later.

Returns:
    The window.

Raises:
    ArgumentError: As for Window.tensor_register().
)";
inline constexpr const char* kBackendSplitDevices =
    R"(Gives a child group that was split off a part of NCCL's communicator, if there is one. All ranks
of this group call it after the split. `child`: `None` if this rank is in none. `willing`: false
if this rank could not make its child; then no rank splits the communicator.)";
inline constexpr const char* kBackendName = "The name of the group's present ranks.";
inline constexpr const char* kBackendDropCoalescing =
    "Drops the calls that this thread has collected in a coalescing block that raised an "
    "exception.";
inline constexpr const char* kBackendSetDefaultTimeout =
    R"(Changes the timeout of later operations.)";
inline constexpr const char* kBackendPerformNocolorSplit =
    R"(Does nothing: a new group's members meet without the ranks that are not in it.

Args:
    device: Not used.
)";

inline constexpr const char* kWindowOptions =
    R"(The options of one call on a window. Under torch 2.14
and later this is torch's own class.)";
inline constexpr const char* kWindowOptionsInit = "Makes options with the group's timeout.";
inline constexpr const char* kWindowOptionsTimeout =
    "The longest time that the call may take, a timedelta; negative: the group's timeout.";
inline constexpr const char* kWindowOptionsHints = "For other backends.";
inline constexpr const char* kWindowAccessType =
    "Whether a rank's memory is mapped here (UNIFIED) or written by messages (SEPARATE).";
inline constexpr const char* kWindowAttr = "The properties of a rank's memory.";
inline constexpr const char* kWindowAttrAccessType = "A WindowAccessType.";

inline constexpr const char* kWindow = R"(Memory of each rank that the others write to.

mycoll.new_window() makes it. Ranks are ranks of its group. With `async_op` a call returns
immediately, with a Work that is done when the operation is; without it, it returns that Work when
it is done.
From torch 2.14 on it is a subclass of torch's Window.

Example:
    window = mycoll.new_window(mycoll.zeros(4))
    if dist.get_rank() == 0:
        window.put(torch.ones(2), dst_rank=1, target_offset_nelems=2, async_op=False)
        window.signal(peer_rank=1, async_op=False)
    elif dist.get_rank() == 1:
        window.wait_signal(peer_rank=0, async_op=False)  # [0, 0, 1, 1]
    window.tensor_deregister()
)";
inline constexpr const char* kWindowTensorRegister =
    R"(Opens the window on a tensor. All ranks call it together, each with its own size and dtype.

The window holds the tensor's memory until it is closed.

Args:
    tensor: A contiguous CPU tensor of at most 16 dimensions.
    owning: For other backends: this one always holds the memory.

Raises:
    ArgumentError: The tensor cannot be written by others, or the window is open.
)";
inline constexpr const char* kWindowTensorDeregister =
    R"(Closes the window. All ranks call it together.

Raises:
    ArgumentError: It is not open.
)";
inline constexpr const char* kWindowPut = R"(Writes a tensor into the window of a rank.

Args:
    tensor: What to write; it has the dtype of that rank's tensor.
    dst_rank: The rank to whose memory it is written.
    target_offset_nelems: The element of that rank's tensor to begin at.
    async_op: Whether to return immediately.
    opts: A mycoll.PutOptions.

Returns:
    A Work, which is done unless `async_op` is set. When it is done, `tensor` may be changed.

Raises:
    ArgumentError: The dtype differs, or the elements do not fit.
)";
inline constexpr const char* kWindowMapRemoteTensor =
    R"(Maps the tensor that a rank of this host has registered.

Args:
    rank: The rank.

Returns:
    A tensor that shares that rank's memory.

Raises:
    NotImplementedError: The rank is on another host, or its tensor is not one of mycoll.empty().
)";
inline constexpr const char* kWindowSignal =
    R"(Signals a rank, which then sees what was put into its window before.

Args:
    peer_rank: The rank that is signalled.
    async_op: Whether to return immediately.
    opts: A mycoll.SignalOptions.

Returns:
    A Work, which is done unless `async_op` is set.
)";
inline constexpr const char* kWindowWaitSignal = R"(Waits for one signal from a rank.

Args:
    peer_rank: The rank that signals.
    async_op: Whether to return immediately.
    opts: A mycoll.WaitSignalOptions.

Returns:
    A Work, which is done unless `async_op` is set.

Raises:
    DistBackendError: No signal came in time, or the rank was lost.
)";
inline constexpr const char* kWindowGetAttr = R"(Returns how a rank's memory is written.

Args:
    peer_rank: The rank.

Returns:
    `.access_type`: UNIFIED if that rank's tensor is mapped here, otherwise SEPARATE.
)";

inline constexpr const char* kSetNcclWheel =
    R"(Names the NCCL of the nvidia-nccl wheel. Called before the first group.

Args:
    path: The path of its library; `""`: there is none.
)";
inline constexpr const char* kSetWhyNoDevices =
    R"(Gives the reason for which groups serve no tensors on devices. Called before the first group.

Args:
    why: The rest of a sentence.
)";
inline constexpr const char* kRequireNcclMemory =
    R"(Raises RuntimeError if NCCL is not there, or too old to allocate memory.)";
inline constexpr const char* kUseNccl =
    R"(For tests: uses this file as NCCL, even if torch has loaded another one. Raises RuntimeError if
it cannot be loaded, or is not NCCL.)";
inline constexpr const char* kEnvironment = R"(Lists the MYCOLL_* variables.

Returns:
    A dictionary for each: name, default, value, help, is_set, source.
)";
inline constexpr const char* kChooseInterface = R"(Chooses the network interfaces of a group.

Args:
    store_host: The host of the group's store; `""`: not known.

Returns:
    Names and addresses, IPv4 first.

Raises:
    DistNetworkError: No interface can be used.
)";
inline constexpr const char* kUsableCores = R"(Counts the cores that this process may keep busy.

Returns:
    The number of cores in its affinity, limited by the quota of its cgroup.
)";
inline constexpr const char* kLogTo =
    R"(Sends the engine's log to a file; `""`: to stderr. `level`: the position of a word of
MYCOLL_LOG, from off = 0 on.)";
inline constexpr const char* kDumpTrace =
    R"(Writes the last operations of this process to a file.

Args:
    path: The file; `""`: where failures are written.

Returns:
    The path.

Raises:
    ArgumentError: It cannot be written.
)";
inline constexpr const char* kBetterSumBlock =
    R"(Returns the MYCOLL_SUM_BLOCK with which hosts that have these numbers of ranks, in the order of
ranks, send fewer partial sums; 0 if none is better.)";
inline constexpr const char* kSingleCopies =
    R"(Returns what this process has measured about reading other ranks' tensors directly. For each
kind of call, number of ranks and size (at least so many bytes, and less than twice that): the
microseconds with staging, those with single copy, and whether single copy is used. Messages
("send") are measured by the ranks that receive them.)";
inline constexpr const char* kCopyStreaming =
    R"(Copies memory past the CPU's caches, as the engine does. For benchmarks.

Args:
    destination: The address to write to.
    source: The address to read from.
    bytes: How many.
)";
inline constexpr const char* kOpenSharedTensors =
    R"(From here on, makes this thread's CPU tensors in memory that other ranks can read. Raises
RuntimeError if another allocator has taken the place of mycoll's.)";
inline constexpr const char* kCloseSharedTensors =
    R"(Ends the latest `_open_shared_tensors()` of this thread. Raises RuntimeError if there is none.)";
inline constexpr const char* kIsSharedMemory =
    R"(Returns whether all of this memory belongs to a shared tensor.)";
inline constexpr const char* kSharedMemoryUsage =
    R"(For tests: returns the bytes of shared tensors' memory that are mapped, and those of them that
are in use.)";
inline constexpr const char* kCloseAll =
    R"(Closes the groups that were never destroyed, while the interpreter still exists. `reason`: sent
to the other ranks; `""`: none.)";
inline constexpr const char* kWriteCoverage =
    "For tests: adds the counts of this process to the files of the coverage measurement.";

}  // namespace mycoll::doc
