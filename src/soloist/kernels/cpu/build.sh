#!/bin/sh
# Build step.c for processors with AVX2 and for those with AVX-512 and its integer products, into the folder given.
# GCC 12.2. OpenMP is not linked: its symbols are those of the library that PyTorch has loaded, so that both use one pool
# of threads.
set -e
here=$(dirname "$0")
flags="-O3 -std=gnu11 -Wall -Wno-psabi -Wno-maybe-uninitialized -fPIC -fopenmp -fvisibility=default -fno-math-errno -fno-trapping-math -ffp-contract=fast"
link="-shared -nostdlib -Wl,--as-needed -Wl,-z,undefs -lc -static-libgcc -lgcc -s"
avx2="-mavx2 -mfma -mf16c"
for name in avx2 avx512; do
    [ $name = avx2 ] && isa=$avx2 || isa="$avx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512"
    "${CC:-gcc}" $flags $isa -c "$here/step.c" -o "$1/step_$name.o"
    "${CC:-gcc}" "$1/step_$name.o" $link -o "$1/step_$name.so"
    rm "$1/step_$name.o"
done
