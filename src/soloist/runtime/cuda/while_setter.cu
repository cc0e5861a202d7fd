// Decides behind every step whether the WHILE node that holds it runs another one.
//
// Built with CUDA 13.0, ARCH = 90 and 100, in this folder:
//   nvcc -arch=sm_$ARCH -rdc=true -cubin -o /tmp/setter.cubin while_setter.cu
//   nvcc -arch=sm_$ARCH -dlink -cubin -o while_setter_sm$ARCH.cubin /tmp/setter.cubin -lcudadevrt

// num_left: tokens that may still be emitted, 0 behind the end of an answer or a stop of the host.
// num_run: steps since the node was entered, 0 between launches. max_steps: after so many it is left in any case.
extern "C" __global__ void set_while(
    cudaGraphConditionalHandle handle, const int* num_left, int* num_run, int max_steps) {
  const int run = *num_run + 1;
  const bool goes_on = *num_left > 0 && run < max_steps;
  *num_run = goes_on ? run : 0;
  cudaGraphSetConditional(handle, goes_on);
}
