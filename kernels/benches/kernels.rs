//! Measures the kernels beside a plain copy of the same bytes in the same run.
//!
//! `cache` works on 64 KiB per input, `memory` on 64 MiB; throughput counts the bytes of all
//! inputs. `memcpy` copies the bytes of all inputs.

use std::{hint::black_box, time::Duration};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gradwire_kernels::{
    Combine, Finish, Level, Store, level, reduce_finish_in_place, reduce_finish_slices,
};
use gradwire_proto::{DType, ReduceOp};

fn place(c: &mut Criterion, name: &str, bytes: usize, levels: &[Level], dtypes: &[DType]) {
    for inputs in [2usize, 4, 8] {
        let data: Vec<Vec<u8>> = (0..inputs).map(|i| vec![i as u8; bytes]).collect();
        let slices: Vec<&[u8]> = data.iter().map(|d| &d[..]).collect();
        let mut group = c.benchmark_group(format!("{name}/{inputs}"));
        group.throughput(Throughput::Bytes((inputs * bytes) as u64));
        group.sample_size(10).measurement_time(Duration::from_secs(1));
        group.warm_up_time(Duration::from_millis(200));

        let mut copies: Vec<Vec<u8>> = data.clone();
        group.bench_function("memcpy", |b| {
            b.iter(|| {
                for (to, from) in copies.iter_mut().zip(&slices) {
                    black_box(&mut to[..]).copy_from_slice(black_box(from));
                }
            });
        });
        for &dtype in dtypes {
            for &level in levels {
                let combine = Combine { dtype, op: ReduceOp::Sum };
                let finish = Finish::none(dtype);
                let id = BenchmarkId::new(format!("sum {dtype}"), level.name());
                group.bench_function(id, |b| {
                    let (out, rest) = copies.split_at_mut(1);
                    black_box(rest);
                    b.iter(|| {
                        let dsts = &mut [&mut out[0][..]];
                        let store = Store::Cached;
                        reduce_finish_slices(
                            level,
                            combine,
                            1.0,
                            &finish,
                            dsts,
                            black_box(&slices),
                            store,
                        )
                    });
                });
            }
            // As on a node without peers: all ranks get the average, in one sweep.
            let combine = Combine { dtype, op: ReduceOp::Average };
            let finish = Finish {
                dtype,
                op: ReduceOp::Average,
                contributors: inputs as u32,
                postscale: 1.0,
            };
            for (how, store) in [("cached", Store::Cached), ("streaming", Store::Streaming)] {
                let id = BenchmarkId::new(format!("average to others {dtype}"), how);
                group.bench_function(id, |b| {
                    b.iter(|| {
                        let mut dsts: Vec<&mut [u8]> =
                            copies.iter_mut().map(|c| &mut c[..]).collect();
                        let (level, slices) = (level(), black_box(&slices));
                        reduce_finish_slices(level, combine, 1.0, &finish, &mut dsts, slices, store)
                    });
                });
                let id = BenchmarkId::new(format!("average in place {dtype}"), how);
                group.bench_function(id, |b| {
                    b.iter(|| {
                        let mut buffers: Vec<&mut [u8]> =
                            black_box(&mut copies).iter_mut().map(|c| &mut c[..]).collect();
                        let buffers = &mut buffers;
                        reduce_finish_in_place(level(), combine, 1.0, &finish, buffers, store)
                    });
                });
            }
        }
        group.finish();
    }
}

fn kernels(c: &mut Criterion) {
    let levels: Vec<Level> = Level::ALL.into_iter().filter(|l| l.is_available()).collect();
    let dtypes = [DType::F32, DType::F16, DType::Bf16, DType::F8E4m3, DType::F8E5m2, DType::I8];
    place(c, "cache", 64 << 10, &levels, &dtypes);
    place(c, "memory", 64 << 20, &[level()], &[DType::F32, DType::Bf16]);
}

criterion_group!(benches, kernels);
criterion_main!(benches);
