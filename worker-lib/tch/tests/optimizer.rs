//! The distributed optimizer and the broadcast of parameters, by the ranks of real jobs.

use std::{num::NonZeroU32, time::Duration};

use gradwire_tch::{DistributedOptimizer, Error, OptimizerOptions, broadcast_parameters};
use gradwire_tests::cluster::{Cluster, Plan};
use gradwire_worker::{BroadcastOptions, DType, GradwireError, ReduceOp, Session, Shape};
use tch::{
    Device, Kind, Tensor,
    nn::{self, Init, OptimizerConfig},
};

const RATE: f64 = 0.5;

/// A job of nodes with so many ranks.
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
fn every_rank_steps_with_the_sum_of_the_gradients() {
    ranks(&[2, 1], |session| {
        let (store, first, second) = parameters(1.0);
        let mut optimizer = wrap(session, &store, 1);
        let own = f64::from(session.rank() + 1);
        for step in 1..=3 {
            // d/dx of own · sum(x): own, transposed so that strides are not the plain ones.
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
fn a_parameter_that_one_rank_does_not_use_is_exchanged_all_the_same() {
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
fn everybody_gets_the_roots_parameters() {
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
fn a_failed_exchange_names_the_gradient_and_makes_no_step() {
    ranks(&[1, 1], |session| {
        let (store, first, _) = parameters(1.0);
        let inner = nn::Sgd::default().build(&store, RATE).unwrap();
        // Sum here, average there: the exchange can't be carried out.
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

/// What else is in flight has ended when a failure is reported, so one can try again at once.
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
            let broadcast = |name: &str, rows: u64| {
                let options = BroadcastOptions::from_rank(0).name(name);
                let buffer = session.buffer(DType::F32, Shape::new(&[rows]).unwrap()).unwrap();
                session.broadcast_async(buffer, options).unwrap().wait()
            };
            broadcast("parameter.bad", 4).unwrap_err();
            // Rank 0 has its failure by now.
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
fn tensors_that_are_not_contiguous_are_packed_and_unpacked() {
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
        // What lies between is not touched.
        assert_eq!(whole.int64_value(&[6]), first + 6);
    });
}

#[test]
fn every_element_type_that_both_know_is_exchanged() {
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
fn elements_that_are_not_exchanged_are_named() {
    ranks(&[1], |session| {
        let half = Tensor::zeros([2], (Kind::ComplexHalf, Device::Cpu));
        let error = broadcast_parameters(session, &with("half", &half), 0).unwrap_err().to_string();
        assert!(error.contains("'half'") && error.contains("ComplexHalf"), "{error}");
    });
}
