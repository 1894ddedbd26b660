//! The distributed optimizer and the broadcast of parameters, by the ranks of real jobs.

use std::{num::NonZeroU32, sync::Barrier, time::Duration};

use gradwire_tch::{DistributedOptimizer, Error, OptimizerOptions, broadcast_parameters};
use gradwire_tests::cluster::{Cluster, Plan};
use gradwire_worker::{
    AllreduceOptions, BroadcastOptions, DType, GradwireError, ReduceOp, Session,
};
use tch::{
    Device, Kind, Tensor,
    nn::{self, Init, OptimizerConfig},
};

const RATE: f64 = 0.5;

/// Runs `rank` on each rank of a job; `slots` are the ranks of each node.
fn ranks(slots: &[u32], rank: impl Fn(&Session) + Send + Sync + 'static) {
    let cluster = Cluster::start(&Plan::nodes(slots)).unwrap();
    cluster.ranks(rank).unwrap();
    cluster.finish().unwrap();
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

/// Parameters of different element types and layouts, all equal to `value`.
fn parameters(value: f64) -> (nn::VarStore, Tensor, Tensor) {
    let store = nn::VarStore::new(Device::Cpu);
    let root = store.root();
    let first = root.var("first", &[2, 3], Init::Const(value));
    let second = root.sub("deep").var("second", &[3], Init::Const(value));
    let _ = root.var_copy("mean", &Tensor::from_slice(&[value; 4]));
    (store, first, second)
}

fn wrap(session: &Session, store: &nn::VarStore, accumulate: u32) -> DistributedOptimizer {
    let accumulate = NonZeroU32::new(accumulate).unwrap();
    let options = OptimizerOptions { op: ReduceOp::Sum, accumulate, ..Default::default() };
    let inner = nn::Sgd::default().build(store, RATE).unwrap();
    DistributedOptimizer::new(session, inner, store, options).unwrap()
}

#[test]
fn every_rank_steps_with_the_summed_gradients() {
    ranks(&[2, 1], |session| {
        let (store, first, second) = parameters(1.0);
        let mut optimizer = wrap(session, &store, 1);
        let own = f64::from(session.rank() + 1);
        for step in 1..=3 {
            // d/dx of own · sum(x): own; transposed, so that the gradient is not contiguous.
            let loss = (first.tr() * own).sum(Kind::Float) + (&second * 2.0).sum(Kind::Float);
            assert!(optimizer.backward_step(&loss).unwrap());
            assert_eq!(values(&first), [1.0 - RATE * 6.0 * f64::from(step); 6]);
            assert_eq!(values(&second), [1.0 - RATE * 6.0 * f64::from(step); 3]);
        }
    });
}

#[test]
fn passes_are_added_up_before_a_step() {
    ranks(&[1, 1], |session| {
        let (store, first, second) = parameters(0.0);
        let mut optimizer = wrap(session, &store, 2);
        let pass = |optimizer: &mut DistributedOptimizer| {
            let loss = first.sum(Kind::Float) + second.sum(Kind::Float);
            optimizer.backward_step(&loss).unwrap()
        };
        assert!(!pass(&mut optimizer));
        assert_eq!(values(&first), [0.0; 6]);
        assert!(pass(&mut optimizer));
        assert_eq!(values(&first), [-RATE * 4.0; 6]);
        assert!(!optimizer.step().unwrap());
        assert!(!pass(&mut optimizer));
        assert!(optimizer.step().unwrap());
        assert_eq!(values(&first), [-RATE * 6.0; 6]);
    });
}

#[test]
fn a_parameter_unused_on_one_rank_is_exchanged() {
    ranks(&[1, 1], |session| {
        let (store, first, second) = parameters(0.0);
        let mut optimizer = wrap(session, &store, 1);
        let mut loss = first.sum(Kind::Float);
        if session.rank() == 0 {
            loss += second.sum(Kind::Float);
        }
        optimizer.backward_step(&loss).unwrap();
        assert_eq!(values(&first), [-RATE * 2.0; 6]);
        assert_eq!(values(&second), [-RATE; 3]);
    });
}

#[test]
fn all_ranks_get_the_roots_parameters() {
    ranks(&[2, 1], |session| {
        let (store, first, second) = parameters(f64::from(session.rank()));
        broadcast_parameters(session, &store, 1).unwrap();
        assert_eq!(values(&first), [1.0; 6]);
        assert_eq!(values(&second), [1.0; 3]);
        assert_eq!(values(&store.variables()["mean"]), [1.0; 4]);
        assert!(first.requires_grad());
        let error = broadcast_parameters(session, &store, 3).unwrap_err();
        assert!(matches!(error, Error::Gradwire(GradwireError::Invalid(_))), "{error}");
    });
}

#[test]
fn a_failed_exchange_is_named_and_makes_no_step() {
    ranks(&[1, 1], |session| {
        let (store, first, _) = parameters(1.0);
        let inner = nn::Sgd::default().build(&store, RATE).unwrap();
        // Sum on one rank, average on the other: the exchange must fail.
        let op = if session.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Average };
        let options = OptimizerOptions { op, ..Default::default() };
        let mut optimizer = DistributedOptimizer::new(session, inner, &store, options).unwrap();
        for _ in 0..2 {
            let error = optimizer.backward_step(&first.sum(Kind::Float)).unwrap_err();
            assert!(error.to_string().contains("gradient.first"), "{error}");
            assert_eq!(values(&first), [1.0; 6]);
            session.barrier().unwrap();
        }
    });
}

/// All other exchanges have ended when a failure is reported, so the caller can retry at once.
#[test]
fn a_failed_exchange_waits_for_the_others() {
    ranks(&[1, 1], |session| {
        let tensors = |rows: i64| -> nn::VarStore {
            let store = with("bad", &Tensor::zeros([rows], (Kind::Float, Device::Cpu)));
            let good = Tensor::zeros([2], (Kind::Float, Device::Cpu));
            store.variables_.lock().unwrap().named_variables.insert("good".into(), good);
            store
        };
        if session.rank() == 0 {
            let error = broadcast_parameters(session, &tensors(3), 0).unwrap_err();
            assert!(error.to_string().contains("parameter.bad"), "{error}");
        } else {
            let broadcast = |name: &str, rows: usize| {
                let options = BroadcastOptions::from_rank(0).name(name);
                let buffer = session.buffer(DType::F32, &[rows]).unwrap();
                session.broadcast_async(buffer, options).unwrap().wait()
            };
            broadcast("parameter.bad", 4).unwrap_err();
            // By now rank 0 has received its failure.
            std::thread::sleep(Duration::from_millis(300));
            broadcast("parameter.good", 2).unwrap();
        }
        broadcast_parameters(session, &tensors(3), 0).unwrap();
    });
}

fn with(name: &str, tensor: &Tensor) -> nn::VarStore {
    let store = nn::VarStore::new(Device::Cpu);
    let variable = tensor.shallow_clone();
    store.variables_.lock().unwrap().named_variables.insert(name.into(), variable);
    store
}

#[test]
fn noncontiguous_tensors_are_packed_and_unpacked() {
    ranks(&[1, 1], |session| {
        let first = i64::from(session.rank()) * 100;
        let whole = Tensor::arange_start(first, first + 24, (Kind::Int64, Device::Cpu));
        // Every second column of a transposed matrix: no two elements are neighbours.
        let strided = whole.reshape([4, 6]).tr().slice(1, 0, None, 2);
        assert!(!strided.is_contiguous());
        broadcast_parameters(session, &with("strided", &strided), 1).unwrap();
        let expected = |i: i64, j: i64| (100 + j * 2 * 6 + i) as f64;
        let flat = (0..6).flat_map(|i| (0..2).map(move |j| expected(i, j)));
        assert_eq!(values(&strided), flat.collect::<Vec<_>>());
        // Elements in between are not touched.
        assert_eq!(whole.int64_value(&[6]), first + 6);
    });
}

#[test]
fn every_common_element_type_is_exchanged() {
    ranks(&[1, 1], |session| {
        let own = f64::from(session.rank());
        for kind in [
            Kind::Bool,
            Kind::Int16,
            Kind::Half,
            Kind::BFloat16,
            Kind::Float8e4m3fn,
            Kind::Float8e5m2,
            Kind::ComplexFloat,
            Kind::ComplexDouble,
        ] {
            let tensor = Tensor::from_slice(&[own, 1.0]).to_kind(kind);
            broadcast_parameters(session, &with("x", &tensor), 1).unwrap();
            assert_eq!(
                values(&if tensor.is_complex() { tensor.real() } else { tensor }),
                [1.0, 1.0],
                "{kind:?}"
            );
        }
    });
}

#[test]
fn an_unsupported_element_type_is_named() {
    ranks(&[1], |session| {
        let half = Tensor::zeros([2], (Kind::ComplexHalf, Device::Cpu));
        let error = broadcast_parameters(session, &with("half", &half), 0).unwrap_err().to_string();
        assert!(error.contains("'half'") && error.contains("ComplexHalf"), "{error}");
    });
}

/// A step without hooks: a backward pass, one exchange after the other, and the optimizer's
/// arithmetic.
fn step_by_hand(session: &Session, store: &nn::VarStore, loss: &Tensor) {
    loss.backward();
    let mut all: Vec<_> = store.variables().into_iter().collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, mut variable) in all.into_iter().filter(|(_, variable)| variable.requires_grad()) {
        let flat: Vec<f32> = Vec::try_from(variable.grad().flatten(0, -1)).unwrap();
        let mut memory = session.tensor(&flat, &[flat.len()]).unwrap();
        let options = AllreduceOptions::named(format!("by hand.{name}")).op(ReduceOp::Average);
        session.allreduce(&mut memory, options).unwrap();
        let mean = Tensor::from_slice(memory.as_slice()).view(variable.size().as_slice());
        variable.zero_grad();
        let _ = tch::no_grad(|| variable.f_sub_(&(mean * RATE)).unwrap());
    }
}

/// Layers. The first one is used twice, and the last one only in odd steps.
struct Layers {
    store: nn::VarStore,
    layers: Vec<Tensor>,
}

impl Layers {
    fn new() -> Self {
        let store = nn::VarStore::new(Device::Cpu);
        let sizes = [[40, 40], [40, 300], [300, 5]];
        let layers = (1..).zip(&sizes).map(|(at, size)| {
            let values = (Tensor::arange(size[0] * size[1], DENSE) * at).sin() * 0.1;
            store.root().var_copy(&format!("layer{at}"), &values.view(*size))
        });
        let layers = layers.collect();
        Self { store, layers }
    }

    fn loss(&self, step: i64, rank: u32) -> Tensor {
        let counted = Tensor::arange(320, DENSE).view([8, 40]);
        let given = (counted * (step + 1) + f64::from(rank) * 0.37).sin();
        let hidden = given.matmul(&self.layers[0]).tanh().matmul(&self.layers[0]);
        let hidden = hidden.tanh().matmul(&self.layers[1]);
        let out = if step % 2 == 1 { hidden.matmul(&self.layers[2]) } else { hidden };
        out.square().mean(Kind::Float)
    }

    fn bits(&self) -> Vec<u32> {
        let flat =
            self.layers.iter().flat_map(|layer| Vec::try_from(layer.flatten(0, -1)).unwrap());
        flat.map(f32::to_bits).collect()
    }
}

const DENSE: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn the_bits_equal_exchanges_after_the_pass() {
    ranks(&[1, 1], |session| {
        let (ours, by_hand) = (Layers::new(), Layers::new());
        let inner = nn::Sgd::default().build(&ours.store, RATE).unwrap();
        let mut optimizer =
            DistributedOptimizer::new(session, inner, &ours.store, Default::default()).unwrap();
        for step in 0..6 {
            optimizer.backward_step(&ours.loss(step, session.rank())).unwrap();
            let mut loss = by_hand.loss(step, session.rank());
            if step % 2 == 0 {
                loss += (&by_hand.layers[2] * 0.0).sum(Kind::Float);
            }
            step_by_hand(session, &by_hand.store, &loss);
            assert_eq!(ours.bits(), by_hand.bits(), "step {step}");
        }
    });
}

#[test]
fn a_gradient_that_is_kept_does_not_change() {
    ranks(&[1, 1], |session| {
        let (store, first, second) = parameters(1.0);
        let mut optimizer = wrap(session, &store, 1);
        let mut step = |factor: f64| {
            let loss = (first.sum(Kind::Float) + second.sum(Kind::Float)) * factor;
            optimizer.backward_step(&loss).unwrap();
            // A tensor, and another one over the same memory.
            (first.grad(), second.grad().detach())
        };
        let kept: Vec<_> = (1..=4).map(|factor| step(f64::from(factor))).collect();
        drop(optimizer);
        let _ = session.zeros::<f32>(&[1 << 16]).unwrap();
        for (factor, (one, other)) in (1..=4).zip(&kept) {
            assert_eq!(values(one), [2.0 * f64::from(factor); 6]);
            assert_eq!(values(other), [2.0 * f64::from(factor); 3]);
        }
    });
}

#[test]
fn a_dropped_optimizer_exchanges_nothing() {
    ranks(&[1, 1], |session| {
        let (store, first, second) = parameters(0.0);
        let loss = || first.sum(Kind::Float) + second.sum(Kind::Float);
        let early = loss();
        let mut optimizer = wrap(session, &store, 1);
        optimizer.backward_step(&loss()).unwrap();
        // A graph that outlives the optimizer.
        let late = loss();
        drop(optimizer);
        let _ = first.grad().zero_();
        if session.rank() == 0 {
            late.backward();
            assert_eq!(values(&first.grad()), [1.0; 6]);
            early.backward();
        }
        // The names are free again.
        let mut optimizer = wrap(session, &store, 1);
        optimizer.backward_step(&loss()).unwrap();
        assert_eq!(values(&first), [-RATE * 4.0; 6]);
        assert_eq!(values(&second), [-RATE * 4.0; 3]);
    });
}

#[test]
fn two_optimizers_may_have_the_same_parameters() {
    ranks(&[1, 1], |session| {
        let (store, first, _) = parameters(0.0);
        let made = |prefix: &str| {
            let inner = nn::Sgd::default().build(&store, RATE).unwrap();
            let prefix = prefix.into();
            let options = OptimizerOptions { op: ReduceOp::Sum, prefix, ..Default::default() };
            DistributedOptimizer::new(session, inner, &store, options).unwrap()
        };
        let (mut one, mut two) = (made("one."), made("two."));
        for step in 1..=3 {
            one.backward_step(&first.sum(Kind::Float)).unwrap();
            two.backward_step(&(first.sum(Kind::Float) * 3.0)).unwrap();
            assert_eq!(values(&first), [-RATE * 8.0 * f64::from(step); 6]);
        }
    });
}

#[test]
fn a_frozen_parameter_keeps_its_values() {
    ranks(&[1, 1], |session| {
        let (store, first, second) = parameters(1.0);
        let mut optimizer = wrap(session, &store, 1);
        let mut step = || {
            let loss = first.sum(Kind::Float) + second.sum(Kind::Float);
            optimizer.backward_step(&loss).unwrap();
            (values(&first)[0], values(&second)[0])
        };
        assert_eq!(step(), (1.0 - 2.0 * RATE, 1.0 - 2.0 * RATE));
        let _ = second.set_requires_grad(false);
        assert_eq!(step(), (1.0 - 4.0 * RATE, 1.0 - 2.0 * RATE));
        assert!(!second.grad().defined());
        let _ = second.set_requires_grad(true);
        assert_eq!(step(), (1.0 - 6.0 * RATE, 1.0 - 4.0 * RATE));
    });
}

#[test]
fn parameters_may_get_another_element_type() {
    ranks(&[1, 1], |session| {
        let (mut store, first, second) = parameters(1.0);
        let mut optimizer = wrap(session, &store, 1);
        optimizer.backward_step(&(first.sum(Kind::Float) + second.sum(Kind::Float))).unwrap();
        store.double();
        optimizer.backward_step(&(first.sum(Kind::Double) + second.sum(Kind::Double))).unwrap();
        assert_eq!((first.kind(), first.grad().kind()), (Kind::Double, Kind::Double));
        assert_eq!(values(&first), [1.0 - 4.0 * RATE; 6]);
    });
}

/// A pass that fails when it has computed the second gradient.
fn failing_pass(optimizer: &mut DistributedOptimizer, first: &Tensor, second: &Tensor) {
    let exp = first.exp();
    let loss = exp.sum(Kind::Float) + second.sum(Kind::Float);
    let _ = exp.detach().f_add_scalar_(1.0).unwrap();
    let error = optimizer.backward_step(&loss).unwrap_err();
    assert!(error.to_string().contains("inplace operation"), "{error}");
}

#[test]
fn a_pass_that_fails_midway_can_be_repeated() {
    ranks(&[1, 1], |session| {
        let (store, first, second) = parameters(0.0);
        let mut optimizer = wrap(session, &store, 2);
        for _ in 0..2 {
            let good = || first.exp().sum(Kind::Float) + second.sum(Kind::Float);
            assert!(!optimizer.backward_step(&good()).unwrap());
            // By then it has exchanged the second gradient.
            failing_pass(&mut optimizer, &first, &second);
            assert_eq!(values(&second), [0.0; 3]);
            assert!(!optimizer.step().unwrap(), "the passes don't count");
        }
        for pass in 0..2 {
            let loss = first.sum(Kind::Float) + second.sum(Kind::Float);
            assert_eq!(optimizer.backward_step(&loss).unwrap(), pass == 1);
        }
        assert_eq!((values(&first)[0], values(&second)[0]), (-RATE * 4.0, -RATE * 4.0));
    });
}

/// Only one of the gradients includes the failed pass, so neither is the sum of the passes.
#[test]
fn a_failed_pass_before_the_last_does_not_count() {
    ranks(&[1, 1], |session| {
        let (store, first, second) = parameters(0.0);
        let mut optimizer = wrap(session, &store, 3);
        let good = || first.sum(Kind::Float) + second.sum(Kind::Float);
        assert!(!optimizer.backward_step(&good()).unwrap());
        failing_pass(&mut optimizer, &first, &second);
        assert!(!optimizer.step().unwrap(), "the passes don't count");
        for pass in 0..3 {
            assert_eq!(optimizer.backward_step(&good()).unwrap(), pass == 2);
        }
        assert_eq!((values(&first)[0], values(&second)[0]), (-RATE * 6.0, -RATE * 6.0));
    });
}

/// The backward pass of rank 0 fails, but rank 1 gets its gradient: the exchange started during the
/// pass.
#[test]
fn an_exchange_begins_in_the_backward_pass() {
    ranks(&[1, 1], |session| {
        if session.rank() == 1 {
            let mut memory = session.tensor(&[5.0_f32; 3], &[3]).unwrap();
            let options = AllreduceOptions::named("gradient.deep.second").op(ReduceOp::Sum);
            session.allreduce(&mut memory, options).unwrap();
            assert_eq!(memory.as_slice(), [12.0; 3]);
        } else {
            let (store, first, second) = parameters(0.0);
            let mut optimizer = wrap(session, &store, 1);
            let exp = first.exp();
            let loss = exp.sum(Kind::Float) + (&second * 7.0).sum(Kind::Float);
            let _ = exp.detach().f_add_scalar_(1.0).unwrap();
            optimizer.backward_step(&loss).unwrap_err();
        }
    });
}

#[test]
fn a_step_reports_a_failed_session() {
    let cluster = Cluster::start(&Plan::nodes(&[1, 1])).unwrap();
    // No optimizer can be created in a failed session, so both are created before.
    let made = Barrier::new(2);
    let ended = cluster.ranks(move |session| {
        let (store, first, second) = parameters(1.0);
        let mut optimizer = wrap(session, &store, 1);
        made.wait();
        if session.rank() == 1 {
            session.abort("no more data");
            return;
        }
        let loss = || first.sum(Kind::Float) + second.sum(Kind::Float);
        for _ in 0..2 {
            let error = optimizer.backward_step(&loss()).unwrap_err();
            assert!(error.to_string().contains("no more data"), "{error}");
            assert_eq!(values(&first), [1.0; 6]);
        }
        // The tensors belong to this process and stay usable.
        optimizer.inner_mut().zero_grad();
        loss().backward();
        assert_eq!(values(&second.grad()), [1.0; 3]);
    });
    ended.unwrap();
}
