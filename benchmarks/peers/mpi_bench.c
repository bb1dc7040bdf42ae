/* MPI's side of benchmarks/peers: the same operations on the same sizes, timed the same way, without torch.
 *
 *   mpiexec -n P mpi_bench SOCKET
 *
 * Every rank connects to the harness' unix socket and obeys its lines; each answer is one line of JSON. Between rounds
 * the ranks block in read(), so that whoever is measured next has the cores to itself.
 *
 *   prepare OP DTYPE REDOP BYTES ROOT WINDOWS EVICT_BYTES   {"ok":1} or {"unsupported":"why"}
 *   verify SEED                                             {"wrong":N}, null where nothing can be verified
 *   run WARMUPS CALLS                                       {"ns":[one per call]}
 *   quit
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { kLineBytes = 64, kGapBytes = 4096 + kLineBytes, kMessagesUnderWay = 16, kMaxCalls = 1 << 20 };

typedef struct {
  const char* name;
  MPI_Datatype type; /* MPI_BYTE: MPI can move it, but not reduce it */
  size_t bytes;
  char kind; /* f float, d double, i signed, u unsigned, b bool, c complex, z double complex, x moved only */
} Dtype;

typedef enum {
  kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kAllToAll, kGather, kScatter, kBarrier, kSendRecv,
  kPingPong, kBandwidth, kOpCount
} Op;

static const char* const kOpNames[kOpCount] = {
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier",
    "sendrecv", "pingpong", "bandwidth"};

/* What `prepare` set. Sizes are in elements; part is a rank's share. */
static struct {
  Op op;
  Dtype dtype;
  char redopName[16];
  MPI_Op redop;
  int root;
  size_t whole, part, sourceBytes, targetBytes, stride, windows, evictBytes;
  char *arena, *evictor;
} work;

static int rank, ranks;
static FILE *commands, *answers;

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

__attribute__((format(printf, 1, 2))) static void answer(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vfprintf(answers, format, values);
  va_end(values);
  fputc('\n', answers);
  fflush(answers);
}

static size_t aligned(size_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }
static bool reduces(void) { return work.op == kAllReduce || work.op == kReduce || work.op == kReduceScatter; }
static bool complexKind(void) { return work.dtype.kind == 'c' || work.dtype.kind == 'z'; }
static bool pairwise(void) { return work.op >= kPingPong; }
static char* source(size_t window) { return work.arena + window % work.windows * work.stride; }
static char* target(size_t window) { return source(window) + aligned(work.sourceBytes); }

static bool findDtype(const char* name) {
  const Dtype all[] = {
      {"float32", MPI_FLOAT, 4, 'f'},    {"float64", MPI_DOUBLE, 8, 'd'},
      {"int8", MPI_INT8_T, 1, 'i'},      {"uint8", MPI_UINT8_T, 1, 'u'},
      {"int16", MPI_INT16_T, 2, 'i'},    {"int32", MPI_INT32_T, 4, 'i'},
      {"int64", MPI_INT64_T, 8, 'i'},    {"bool", MPI_C_BOOL, 1, 'b'},
      {"float16", MPI_BYTE, 2, 'x'},     {"bfloat16", MPI_BYTE, 2, 'x'},
      {"float8_e4m3fn", MPI_BYTE, 1, 'x'}, {"float8_e5m2", MPI_BYTE, 1, 'x'},
      {"complex64", MPI_C_FLOAT_COMPLEX, 8, 'c'}, {"complex128", MPI_C_DOUBLE_COMPLEX, 16, 'z'},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) {
    if (strcmp(all[i].name, name) == 0) {
      work.dtype = all[i];
      return true;
    }
  }
  return false;
}

static bool findRedop(const char* name) {
  const bool logical = work.dtype.kind == 'b';
  if (strcmp(name, "sum") == 0) work.redop = logical ? MPI_LOR : MPI_SUM;
  else if (strcmp(name, "prod") == 0) work.redop = logical ? MPI_LAND : MPI_PROD;
  else if (strcmp(name, "max") == 0 && !complexKind()) work.redop = logical ? MPI_LOR : MPI_MAX;
  else if (strcmp(name, "min") == 0 && !complexKind()) work.redop = logical ? MPI_LAND : MPI_MIN;
  else return false;
  return true;
}

static void prepare(const char* opName, const char* dtypeName, const char* redopName, size_t bytes, int root,
                    size_t windows, size_t evictBytes) {
  work.op = 0;
  while (work.op < kOpCount && strcmp(kOpNames[work.op], opName) != 0) ++work.op;
  if (work.op == kOpCount) return answer("{\"unsupported\":\"mpi_bench has no %s\"}", opName);
  if (!findDtype(dtypeName)) return answer("{\"unsupported\":\"mpi_bench has no %s\"}", dtypeName);
  if (reduces() && (work.dtype.kind == 'x' || !findRedop(redopName)))
    return answer("{\"unsupported\":\"MPI has no %s of %s\"}", redopName, dtypeName);
  snprintf(work.redopName, sizeof work.redopName, "%s", redopName);
  work.root = root < 0 ? 0 : root;
  work.whole = bytes / work.dtype.bytes;
  work.part = work.whole / ranks;
  if (pairwise() && rank > 1) windows = 1, evictBytes = 0; /* only waits */
  if (work.whole * (work.dtype.kind == 'x' ? work.dtype.bytes : 1) > INT32_MAX)
    return answer("{\"unsupported\":\"more elements than an int counts\"}");
  const size_t part = work.part * work.dtype.bytes;
  work.sourceBytes = work.op == kAllGather || work.op == kGather ? part : bytes;
  work.targetBytes = work.op == kReduceScatter || work.op == kScatter ? part
                     : work.op == kAllReduce || work.op == kBroadcast || work.op == kReduce ? 0 : bytes;
  work.windows = windows;
  work.stride = aligned(work.sourceBytes) + aligned(work.targetBytes) + kGapBytes;
  work.evictBytes = evictBytes;
  free(work.arena);
  free(work.evictor);
  work.arena = aligned_alloc(4096, (work.stride * windows + 4095) / 4096 * 4096);
  work.evictor = evictBytes ? malloc(evictBytes) : NULL;
  if (!work.arena || (evictBytes && !work.evictor)) return answer("{\"unsupported\":\"out of memory\"}");
  memset(work.arena, 1, work.stride * windows);
  answer("{\"ok\":1}");
}

/* Ones everywhere, as in the harness' own arena: sums stay finite, and nothing is left in cache. */
static void refill(void) {
  for (size_t at = 0; at + work.dtype.bytes <= work.stride * work.windows; at += work.dtype.bytes) {
    char* element = work.arena + at;
    if (work.dtype.kind == 'f' || work.dtype.kind == 'c') {
      for (size_t i = 0; i < work.dtype.bytes / 4; ++i) ((float*)element)[i] = 1;
    } else if (work.dtype.kind == 'd' || work.dtype.kind == 'z') {
      for (size_t i = 0; i < work.dtype.bytes / 8; ++i) ((double*)element)[i] = 1;
    } else {
      memset(element, 1, work.dtype.bytes);
    }
  }
  if (work.evictBytes) memset(work.evictor, rank + 1, work.evictBytes);
}

static void underWay(size_t first, int count, MPI_Datatype type) {
  MPI_Request requests[kMessagesUnderWay];
  MPI_Status statuses[kMessagesUnderWay];
  const int peer = 1 - rank;
  for (int i = 0; i < kMessagesUnderWay; ++i) {
    if (rank == 0) MPI_Isend(source(first + i), count, type, peer, 0, MPI_COMM_WORLD, &requests[i]);
    else MPI_Irecv(target(first + i), count, type, peer, 0, MPI_COMM_WORLD, &requests[i]);
  }
  MPI_Waitall(kMessagesUnderWay, requests, statuses);
  char acknowledgement = 0;
  if (rank == 0) MPI_Recv(&acknowledgement, 1, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  else MPI_Send(&acknowledgement, 1, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
}

/* The windows of a call begin where those of the call before have ended. */
static size_t windowsPerCall(void) {
  return work.op == kBandwidth ? kMessagesUnderWay : 1;
}

static void call(size_t number) {
  const size_t at = number * windowsPerCall();
  const MPI_Comm world = MPI_COMM_WORLD;
  const int scale = work.dtype.kind == 'x' ? (int)work.dtype.bytes : 1;
  const int whole = (int)work.whole * scale, part = (int)work.part * scale, root = work.root, peer = 1 - rank;
  const MPI_Datatype type = work.dtype.type;
  char *in = source(at), *out = target(at);
  switch (work.op) {
    case kAllReduce: MPI_Allreduce(MPI_IN_PLACE, in, whole, type, work.redop, world); break;
    case kBroadcast: MPI_Bcast(in, whole, type, root, world); break;
    case kReduce:
      MPI_Reduce(rank == root ? MPI_IN_PLACE : in, rank == root ? in : NULL, whole, type, work.redop, root, world);
      break;
    case kAllGather: MPI_Allgather(in, part, type, out, part, type, world); break;
    case kReduceScatter: MPI_Reduce_scatter_block(in, out, part, type, work.redop, world); break;
    case kAllToAll: MPI_Alltoall(in, part, type, out, part, type, world); break;
    case kGather: MPI_Gather(in, part, type, out, part, type, root, world); break;
    case kScatter: MPI_Scatter(in, part, type, out, part, type, root, world); break;
    case kBarrier: MPI_Barrier(world); break;
    case kSendRecv:
      MPI_Sendrecv(in, whole, type, (rank + 1) % ranks, 0, out, whole, type, (rank + ranks - 1) % ranks, 0, world,
                   MPI_STATUS_IGNORE);
      break;
    case kPingPong:
      if (rank == 0) MPI_Send(in, whole, type, peer, 0, world);
      MPI_Recv(out, whole, type, peer, 0, world, MPI_STATUS_IGNORE);
      if (rank == 1) MPI_Send(in, whole, type, peer, 0, world);
      break;
    case kBandwidth: underWay(at, whole, type); break;
    case kOpCount: break;
  }
}

static void run(int warmups, int calls) {
  int64_t* times = malloc(sizeof *times * (calls + 1));
  refill();
  MPI_Barrier(MPI_COMM_WORLD);
  const bool takesPart = !pairwise() || rank < 2;
  if (!takesPart) calls = 0;
  for (int i = 0; takesPart && i < warmups; ++i) call(i);
  int64_t before = now();
  for (int i = 0; i < calls; ++i) {
    call(warmups + i);
    const int64_t after = now();
    times[i] = after - before;
    before = after;
  }
  fputs("{\"ns\":[", answers);
  for (int i = 0; i < calls; ++i) fprintf(answers, i ? ",%lld" : "%lld", (long long)times[i]);
  answer("]}");
  free(times);
}

/* Imaginary parts count only in complex dtypes. */
typedef struct {
  int real, imaginary;
} Value;

static Value times(Value a, Value b) {
  return (Value){a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

/* Small integers, exact in every dtype, that depend on index, rank and seed; periods are prime. */
static Value value(size_t index, int ofRank, int seed) {
  static const Value quarterTurns[] = {{1, 0}, {0, 1}, {-1, 0}, {0, -1}};
  const size_t mixed = index + 19 * (size_t)ofRank + 23 * (size_t)seed;
  if (work.dtype.kind == 'b') return (Value){mixed % 7 == 1 || mixed % 7 == 2 || mixed % 7 == 4, 0};
  if (strcmp(work.redopName, "prod") == 0) {
    const Value length = {ofRank < 6 ? 1 + (mixed % 5 == 0) : 1, 0};
    return complexKind() ? times(length, quarterTurns[mixed % 5 % 4]) : length;
  }
  const int period = ranks < 10 ? 13 : 3, real = (int)(mixed % period);
  return (Value){real, (2 * real + 1) % period};
}

static void put(char* buffer, size_t index, Value number) {
  char* at = buffer + index * work.dtype.bytes;
  const int64_t integer = number.real;
  if (work.dtype.kind == 'f') *(float*)at = (float)number.real;
  else if (work.dtype.kind == 'd') *(double*)at = number.real;
  else if (work.dtype.kind == 'c') ((float*)at)[0] = (float)number.real, ((float*)at)[1] = (float)number.imaginary;
  else if (work.dtype.kind == 'z') ((double*)at)[0] = number.real, ((double*)at)[1] = number.imaginary;
  else memcpy(at, &integer, work.dtype.bytes); /* little endian; moved-only dtypes are just bytes */
}

/* Byte by byte, except that a product of complex numbers may give either zero. */
static bool same(const char* found, const char* expected) {
  const float *a = (const float*)found, *b = (const float*)expected;
  const double *c = (const double*)found, *d = (const double*)expected;
  if (work.dtype.kind == 'c') return a[0] == b[0] && a[1] == b[1];
  if (work.dtype.kind == 'z') return c[0] == d[0] && c[1] == d[1];
  return memcmp(found, expected, work.dtype.bytes) == 0;
}

static Value reduced(size_t index, int seed) {
  Value result = value(index, 0, seed);
  for (int r = 1; r < ranks; ++r) {
    const Value other = value(index, r, seed);
    if (work.redop == MPI_SUM) result.real += other.real, result.imaginary += other.imaginary;
    else if (work.redop == MPI_PROD) result = times(result, other);
    else if (work.redop == MPI_MAX) result = other.real > result.real ? other : result;
    else if (work.redop == MPI_MIN) result = other.real < result.real ? other : result;
    else if (work.redop == MPI_LOR) result.real |= other.real;
    else result.real &= other.real;
  }
  return result;
}

/* Elements [0, count) of out must be those from offset on of a rank's input, or of the reduction (ofRank -1). */
static long differing(const char* out, size_t count, int ofRank, size_t offset, int seed) {
  _Alignas(16) char expected[16];
  long wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    put(expected, 0, ofRank < 0 ? reduced(offset + i, seed) : value(offset + i, ofRank, seed));
    wrong += !same(out + i * work.dtype.bytes, expected);
  }
  return wrong;
}

static void poison(size_t at, int seed) {
  for (size_t i = 0; i < work.sourceBytes / work.dtype.bytes; ++i) put(source(at), i, value(i, rank, seed));
  memset(target(at), 0x5A, work.targetBytes);
}

/* Wrong elements on this rank in one of the windows of a call. */
static long wrongIn(size_t at, int seed) {
  const size_t part = work.part, whole = work.whole, bytes = work.dtype.bytes;
  const bool root = rank == work.root;
  long wrong = 0;
  switch (work.op) {
    case kAllReduce: wrong = differing(source(at), whole, -1, 0, seed); break;
    case kBroadcast: wrong = differing(source(at), whole, work.root, 0, seed); break;
    case kReduce: wrong = root ? differing(source(at), whole, -1, 0, seed) : 0; break;
    case kReduceScatter: wrong = differing(target(at), part, -1, rank * part, seed); break;
    case kScatter: wrong = differing(target(at), part, work.root, rank * part, seed); break;
    case kSendRecv: wrong = differing(target(at), whole, (rank + ranks - 1) % ranks, 0, seed); break;
    case kPingPong:
    case kBandwidth: wrong = rank == 1 ? differing(target(at), whole, 0, 0, seed) : 0; break;
    default: /* parts of all ranks */
      for (int r = 0; r < ranks && (root || work.op != kGather); ++r)
        wrong += differing(target(at) + r * part * bytes, part, r, work.op == kAllToAll ? rank * part : 0, seed);
  }
  return wrong;
}

/* Every message of a call has a seed of its own, so that exchanged ones show. */
static void verify(int seed) {
  const size_t most = windowsPerCall(), used = most < work.windows ? most : work.windows, first = seed * most;
  long wrong = 0;
  if (pairwise() && rank > 1) return answer("{\"wrong\":0}");
  for (size_t i = 0; i < used && work.op != kBarrier; ++i) poison(first + i, (int)(first + i));
  call(seed);
  if (work.op == kBarrier) return answer("{\"wrong\":null}");
  for (size_t i = 0; i < used; ++i) wrong += wrongIn(first + i, (int)(first + i));
  answer("{\"wrong\":%ld}", wrong);
}

static void obey(void) {
  char line[512], op[32], dtype[32], redop[16];
  size_t bytes, windows, evictBytes;
  int root, warmups, calls, seed;
  while (fgets(line, sizeof line, commands) && strcmp(line, "quit\n") != 0) {
    if (sscanf(line, "prepare %31s %31s %15s %zu %d %zu %zu", op, dtype, redop, &bytes, &root, &windows,
               &evictBytes) == 7)
      prepare(op, dtype, redop, bytes, root, windows ? windows : 1, evictBytes);
    else if (sscanf(line, "verify %d", &seed) == 1)
      verify(seed);
    else if (sscanf(line, "run %d %d", &warmups, &calls) == 2 && calls >= 0 && calls < kMaxCalls)
      run(warmups, calls);
    else
      answer("{\"unsupported\":\"mpi_bench did not understand the harness\"}");
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (argc != 2 || strlen(argv[1]) >= sizeof address.sun_path) {
    fprintf(stderr, "usage: mpi_bench SOCKET (started by benchmarks/peers)\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  strcpy(address.sun_path, argv[1]);
  const int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
  if (descriptor < 0 || connect(descriptor, (struct sockaddr*)&address, sizeof address) != 0) {
    perror("mpi_bench: connect");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  commands = fdopen(descriptor, "r");
  answers = fdopen(dup(descriptor), "w");
  char library[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(library, &length);
  library[strcspn(library, "\n\"\\,")] = 0;
  for (char* c = library; *c; ++c) *c = *c == '\t' ? ' ' : *c;
  answer("{\"rank\":%d,\"library\":\"%s\"}", rank, library);
  obey();
  fclose(commands);
  fclose(answers);
  MPI_Finalize();
  return 0;
}
