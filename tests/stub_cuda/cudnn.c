/* cuDNN without a device: sizes are small, and descriptors have three sizes of one. */
#include <stdlib.h>

int cudnnCreate(void **handle) { *handle = malloc(64); return 0; }
size_t cudnnGetVersion(void) { return 91000; }
const char *cudnnGetErrorString(int error) { return "stub"; }
int cudnnDropoutGetStatesSize(void *handle, size_t *size) { *size = 256; return 0; }
int cudnnGetRNNWeightSpaceSize(void *handle, void *rnn, size_t *size) { *size = 1 << 16; return 0; }
int cudnnGetRNNTempSpaceSizes(void *handle, void *rnn, int mode, void *x, size_t *work, size_t *reserve) {
    *work = *reserve = 256;
    return 0;
}
int cudnnGetRNNWeightParams(void *handle, void *rnn, int layer, size_t size, void *weights, int part, void *matrix_like,
                            void **matrix, void *bias_like, void **bias) {
    *matrix = *bias = weights;
    return 0;
}
int cudnnGetTensorNdDescriptor(void *tensor, int asked, int *type, int *count, int *sizes, int *steps) {
    *type = 0;
    *count = 3;
    for (int axis = 0; axis < 3; axis++) sizes[axis] = steps[axis] = 1;
    return 0;
}
