//! Training steps of a model: the coordinator's engine orders them, in simulated time.

use gradwire_collectives::{Algorithm, CostModel, LinkCost, Rules, Spec, Topology};
use gradwire_coordinator::EngineConfig;
use gradwire_proto::{JobId, Priority, TensorName};
use gradwire_settings::{Algorithms, Settings};
use gradwire_simulator::{
    Setup,
    config::Control,
    network::Network,
    priced, run,
    training::{Gradient, Model, Training},
};

/// 10 Gbit/s.
const RATE: f64 = 1.25e9;
const LATENCY: f64 = 10e-6;

fn model(elements: &[u64], compute: f64) -> Model {
    let gradient = |(at, &elements): (usize, &u64)| Gradient {
        name: TensorName::new(&format!("layer{at}")).unwrap(),
        elements,
        // Front layers are the most urgent.
        priority: Priority(1000 - at as i32),
    };
    Model { gradients: elements.iter().enumerate().map(gradient).collect(), compute }
}

fn cost() -> CostModel {
    let link = LinkCost { latency: LATENCY, per_byte: 1.0 / RATE };
    CostModel {
        in_rack: link,
        cross_rack: link,
        reduce_per_byte: 0.0,
        per_message: 0.0,
        burst_loss: 0.0,
        incast_loss: 0.0,
        chunk: 256 << 10,
        ..CostModel::default()
    }
}

fn config(nodes: u32, rules: &str) -> EngineConfig {
    let mut settings = Settings::default();
    settings.negotiation.algorithm = Algorithms(Rules::parse(rules).unwrap());
    let config = EngineConfig::new(JobId::new("plan").unwrap(), nodes, 0, &settings).unwrap();
    EngineConfig { cost: cost(), ..config }
}

fn setup(topology: Topology) -> Setup {
    Setup::new(Network::even(topology, RATE, LATENCY))
}

/// The steps of a model on `hosts` hosts in one rack.
fn trained(model: &Model, hosts: u32, steps: u32, rules: &str, control: Control) -> Training {
    let topology = Topology::flat(hosts);
    let config = config(hosts, rules);
    let mut training = Training::new(model, steps, &topology, config, control).unwrap();
    let outcome = run(&setup(topology), &mut training);
    assert_eq!((outcome.standstill, training.failure()), (None, None));
    assert_eq!(training.taken().len(), steps as usize);
    training
}

fn bytes(training: &Training) -> u64 {
    training.used().values().map(|used| used.bytes).sum()
}

/// A ring carries 2(N−1)/N of all bytes on each line, once all of them are ready.
#[test]
fn a_step_without_compute_takes_its_bytes() {
    let model = model(&[1 << 20, 4 << 20, 3], 0.0);
    for hosts in [2, 4, 8] {
        let training = trained(&model, hosts, 1, "ring", Control::default());
        assert_eq!(bytes(&training), model.bytes());
        let share = 2.0 * f64::from(hosts - 1) / f64::from(hosts);
        let ratio = training.taken()[0] / (share * model.bytes() as f64 / RATE);
        assert!((1.0..1.1).contains(&ratio), "{hosts} hosts: {ratio}");
    }
}

/// Gradients are sent while others are computed: only the last one remains at the end.
#[test]
fn computing_hides_the_exchange() {
    let compute = 0.5;
    let model = model(&[1 << 20; 10], compute);
    let training = trained(&model, 4, 1, "ring", Control::default());
    let last = 1.5 * f64::from(4 << 20) / RATE;
    let exposed = training.taken()[0] - compute;
    assert!((last..1.2 * last).contains(&exposed), "{exposed} {last}");
}

/// The engine fuses small gradients and cuts large ones.
#[test]
fn pieces_are_those_of_the_engine() {
    let small = trained(&model(&[256; 400], 0.0), 2, 1, "ring", Control::default());
    let operations = |training: &Training| training.used()[&Algorithm::Ring.into()].operations;
    assert!(operations(&small) < 20, "{}", operations(&small));
    let large = trained(&model(&[64 << 20], 0.0), 2, 1, "ring", Control::default());
    // The lanes share the rest at the end.
    assert!((64..80).contains(&operations(&large)), "{}", operations(&large));
}

/// Later steps announce gradients by their ids, even if there are fewer ids than gradients.
#[test]
fn all_steps_take_equally_long() {
    let model = model(&[300_000, 20, 1_000_000, 4000, 7], 0.01);
    for ids in [262_144, 2] {
        let topology = Topology::flat(4);
        let config = EngineConfig { max_tensors: ids, ..config(4, "circulant") };
        let control = Control { call: 0.0, order: 20e-6, done: 30e-6, credit: 8 };
        let mut training = Training::new(&model, 3, &topology, config, control).unwrap();
        run(&setup(topology), &mut training);
        assert_eq!((training.failure(), bytes(&training)), (None, 3 * model.bytes()));
        let [first, second, third] = training.taken() else { panic!("three steps") };
        assert!((first / second - 1.0).abs() < 1e-6 && (second / third - 1.0).abs() < 1e-6);
    }
}

/// Each operation waits for its order, and with little credit for the end of others.
#[test]
fn the_coordinator_takes_its_time() {
    let model = model(&[1 << 20; 8], 0.0);
    let time = |order, done, credit| {
        let control = Control { call: 0.0, order, done, credit };
        let topology = Topology::flat(2);
        let config = EngineConfig { credit_pieces: credit, ..config(2, "ring") };
        let mut training = Training::new(&model, 1, &topology, config, control).unwrap();
        run(&setup(topology), &mut training);
        (training.taken()[0], training.used()[&Algorithm::Ring.into()].operations as f64)
    };
    let ((alone, _), (late, pieces)) = (time(0.0, 0.0, 1), time(2e-3, 1e-3, 1));
    // Each piece is ordered, and all but the first wait for the end of another piece.
    let expected = pieces * 2e-3 + (pieces - 1.0) * 1e-3;
    assert!((late - alone - expected).abs() < 1e-5, "{late} {alone} {expected}");
    let ((alone, _), (late, _)) = (time(0.0, 0.0, 64), time(2e-3, 1e-3, 64));
    assert!((late - alone - 2e-3).abs() < 1e-5, "{late} {alone}");
}

/// Without rules the engine chooses by the cost model: for long pipelines among eight hosts, the
/// cheapest algorithm.
#[test]
fn algorithms_are_chosen_by_the_engine() {
    let auto = "ring,recursive-doubling,double-tree,hierarchical,circulant,linear";
    let large = trained(&model(&[16 << 20], 0.0), 8, 1, auto, Control::default());
    let used: Vec<&Spec> = large.used().keys().collect();
    assert!(!used.contains(&&Algorithm::RecursiveDoubling.into()), "{used:?}");
    let small = trained(&model(&[16], 0.0), 64, 1, auto, Control::default());
    let used: Vec<&Spec> = small.used().keys().collect();
    assert!(!used.contains(&&Algorithm::Ring.into()), "{used:?}");
}

/// The engine knows the racks of the network.
#[test]
fn racks_are_known() {
    let topology = Topology::from_racks((0..16).map(|host| host / 4).collect());
    let model = model(&[1 << 20; 4], 0.0);
    let slow = LinkCost { latency: LATENCY, per_byte: 8.0 / RATE };
    let config = EngineConfig {
        cost: CostModel { cross_rack: slow, ..cost() },
        ..config(16, "direct,hierarchical")
    };
    let mut training =
        Training::new(&model, 1, &topology, config.clone(), Control::default()).unwrap();
    priced::run(&config.cost, &topology, &mut training).unwrap();
    let used: Vec<&Spec> = training.used().keys().collect();
    assert_eq!(used, [&Algorithm::Hierarchical.into()]);
}

/// The cost model alone gives about the same time.
#[test]
fn a_priced_step_is_near_the_simulated_one() {
    let model = model(&[1 << 20, 4 << 20, 3, 100_000, 2 << 20], 0.005);
    for hosts in [2, 8, 16] {
        for rules in ["ring", "circulant", "hierarchical", "recursive-doubling"] {
            let simulated = trained(&model, hosts, 2, rules, Control::default());
            let topology = Topology::flat(hosts);
            let config = config(hosts, rules);
            let mut training =
                Training::new(&model, 2, &topology, config.clone(), Control::default()).unwrap();
            priced::run(&config.cost, &topology, &mut training).unwrap();
            assert_eq!(bytes(&training), 2 * model.bytes());
            for (priced, simulated) in training.taken().iter().zip(simulated.taken()) {
                let ratio = priced / simulated;
                assert!((0.7..1.3).contains(&ratio), "{rules}, {hosts} hosts: {ratio}");
            }
        }
    }
}

#[test]
fn a_job_that_the_coordinator_refuses_fails() {
    let topology = Topology::flat(5000);
    let refused =
        Training::new(&model(&[1], 0.0), 1, &topology, config(5000, "ring"), Control::default());
    assert!(refused.is_err_and(|why| why.contains("nodes is 5000: it must be 1 to 4096")));
}
