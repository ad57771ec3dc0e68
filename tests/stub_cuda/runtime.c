/* The CUDA runtime without a device: memory is the host's, a copy is a copy, a kernel is nothing.
 * With STUB_CUDA_TRACE every launch, copy and wait is a line of standard error: its name and its stream.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *Stream;

static int trace(const char *what, Stream stream) {
    if (getenv("STUB_CUDA_TRACE")) fprintf(stderr, "[stub] %s %p\n", what, stream);
    return 0;
}

static int some(void **memory, size_t size) {
    return posix_memalign(memory, 256, size ? size : 1) ? 2 : 0;
}

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }

/* cudaDeviceProp of CUDA 13 has 1008 bytes; the offsets are those of its header. */
int cudaGetDeviceProperties(char *properties, int device) {
    memset(properties, 0, 1008);
    strcpy(properties, "stub");
    *(size_t *)(properties + 288) = 80ull << 30;  /* totalGlobalMem */
    *(size_t *)(properties + 296) = 49152;        /* sharedMemPerBlock */
    *(int *)(properties + 304) = 65536;           /* regsPerBlock */
    *(int *)(properties + 308) = 32;              /* warpSize */
    *(int *)(properties + 320) = 1024;            /* maxThreadsPerBlock */
    int *sizes = (int *)(properties + 324);       /* maxThreadsDim, maxGridSize */
    sizes[0] = sizes[1] = 1024; sizes[2] = 64;
    sizes[3] = 2147483647; sizes[4] = sizes[5] = 65535;
    *(int *)(properties + 360) = 9;               /* major */
    *(int *)(properties + 384) = 132;             /* multiProcessorCount */
    *(int *)(properties + 596) = 50 << 20;        /* l2CacheSize */
    *(int *)(properties + 604) = 2048;            /* maxThreadsPerMultiProcessor */
    *(size_t *)(properties + 624) = 233472;       /* sharedMemPerMultiprocessor */
    *(size_t *)(properties + 672) = 232448;       /* sharedMemPerBlockOptin */
    return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: *value = 1024; break;     /* maxThreadsPerBlock */
    case 16: *value = 132; break;     /* multiProcessorCount */
    case 75: *value = 9; break;       /* computeCapabilityMajor */
    case 76: *value = 0; break;       /* computeCapabilityMinor */
    case 97: *value = 232448; break;  /* maxSharedMemoryPerBlockOptin */
    default: *value = 1;
    }
    return 0;
}

int cudaMalloc(void **memory, size_t size) { return some(memory, size); }
int cudaMallocFromPoolAsync(void **memory, size_t size, void *pool, Stream stream) { return some(memory, size); }
int cudaHostAlloc(void **memory, size_t size, unsigned flags) { return some(memory, size); }
int cudaMallocHost(void **memory, size_t size) { return some(memory, size); }
int cudaFree(void *memory) { free(memory); return 0; }
int cudaFreeAsync(void *memory, Stream stream) { free(memory); return 0; }
int cudaFreeHost(void *memory) { free(memory); return 0; }
int cudaMemGetInfo(size_t *left, size_t *all) { *left = 79ull << 30; *all = 80ull << 30; return 0; }

int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    memcpy(target, source, size);
    return trace("copies and waits", 0);
}
int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, Stream stream) {
    static const char *kinds[] = {"copies on the host", "copies in", "copies out", "copies", "copies"};
    memcpy(target, source, size);
    return trace(kinds[kind], stream);
}
int cudaMemset(void *target, int value, size_t size) { memset(target, value, size); return 0; }
int cudaMemsetAsync(void *target, int value, size_t size, Stream stream) {
    memset(target, value, size);
    return trace("sets", stream);
}

static int made(Stream *one) { return some(one, 64); }
int cudaStreamCreate(Stream *stream) { return made(stream); }
int cudaStreamCreateWithFlags(Stream *stream, unsigned flags) { return made(stream); }
int cudaEventCreate(void **event) { return made(event); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return made(event); }
int cudaStreamIsCapturing(Stream stream, int *status) { *status = 0; return 0; }
int cudaStreamSynchronize(Stream stream) { return trace("waits", stream); }
int cudaDeviceSynchronize(void) { return trace("waits for all", 0); }
int cudaEventSynchronize(void *event) { return trace("waits for an event", 0); }

typedef struct { unsigned x, y, z; } Sizes;
/* A launch `kernel<<<...>>>` pushes its configuration, and the function that nvcc made of the kernel pops it. */
static __thread struct { Sizes grid, block; size_t shared; Stream stream; } pushed;
int __cudaPushCallConfiguration(Sizes grid, Sizes block, size_t shared, Stream stream) {
    pushed.grid = grid; pushed.block = block; pushed.shared = shared; pushed.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(Sizes *grid, Sizes *block, size_t *shared, void *stream) {
    *grid = pushed.grid; *block = pushed.block; *shared = pushed.shared; *(Stream *)stream = pushed.stream;
    return 0;
}
int cudaLaunchKernel(const void *kernel, Sizes grid, Sizes block, void **args, size_t shared, Stream stream) {
    return trace("launches", stream);
}
int __cudaLaunchKernel(const void *kernel, Sizes grid, Sizes block, void **args, size_t shared, Stream stream) {
    return trace("launches", stream);
}
int __cudaGetKernel(void **kernel, const void *entry) { *kernel = (void *)entry; return 0; }

const char *cudaGetErrorString(int error) { return "stub"; }
const char *cudaGetErrorName(int error) { return "stub"; }
int cudaPointerGetAttributes(int *attributes, const void *memory) {
    memset(attributes, 0, 88);
    attributes[0] = 2;  /* device memory */
    return 0;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle[4]; return handle; }

int cublasCreate_v2(void **handle) { return made(handle); }
int cublasLtCreate(void **handle) { return made(handle); }
