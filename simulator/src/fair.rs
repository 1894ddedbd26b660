//! Max-min fair rates by progressive filling.
//!
//! All flows grow at one rate until a resource is full; its flows keep their rate, and the others
//! grow on. A flow uses each of its resources with a weight: what it takes of it for one byte.
//! When something changes, only the flows are computed again that share a resource with it, or
//! share one with those, and so on.

use std::{cmp::Reverse, collections::BinaryHeap};

/// The number of a resource.
pub type ResourceId = u32;

/// The number of a flow.
pub type FlowId = u32;

/// Levels that differ by less are one: flows that are alike end together.
const SAME: f64 = 1e-9;

/// A resource of a flow, and what the flow takes of it for one byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Use {
    /// The resource.
    pub resource: ResourceId,
    /// How much of it a byte takes; more than 0.
    pub weight: f64,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    used: Use,
    /// Where the flow is in the resource's list, while it is active.
    at: u32,
}

#[derive(Debug, Default)]
struct Resource {
    capacity: f64,
    /// The active flows, and which of their places this is.
    flows: Vec<(FlowId, u32)>,
    is_touched: bool,
    /// Scratch of one computation.
    seen: u64,
    left: f64,
    weights: f64,
    growing: u32,
}

impl Resource {
    /// The rate at which it is full.
    fn level(&self) -> f64 {
        if self.growing == 0 { f64::INFINITY } else { (self.left / self.weights).max(0.0) }
    }
}

#[derive(Debug)]
struct Flow {
    places: Vec<Place>,
    /// It is never faster.
    cap: f64,
    rate: f64,
    is_active: bool,
    seen: u64,
    is_settled: bool,
}

/// A heap's entry: a resource, or a flow with a cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    Resource(ResourceId),
    Flow(FlowId),
}

/// Resources and flows with their rates.
#[derive(Debug, Default)]
pub struct Fair {
    resources: Vec<Resource>,
    flows: Vec<Flow>,
    touched: Vec<ResourceId>,
    round: u64,
    component: (Vec<FlowId>, Vec<ResourceId>),
    heap: BinaryHeap<Reverse<(u64, Limit)>>,
}

/// Rates are never negative, so their bits are in order.
fn key(level: f64) -> u64 {
    level.to_bits()
}

impl Fair {
    /// Adds a resource.
    pub fn add_resource(&mut self, capacity: f64) -> ResourceId {
        self.resources.push(Resource { capacity, ..Resource::default() });
        self.resources.len() as u32 - 1
    }

    /// Adds a flow, which is not active. A resource that it uses several times is given once, with
    /// the sum of the weights.
    pub fn add_flow(&mut self, uses: &[Use], cap: f64) -> FlowId {
        let places = uses.iter().map(|&used| Place { used, at: 0 }).collect();
        let (rate, is_active, seen, is_settled) = (0.0, false, 0, false);
        self.flows.push(Flow { places, cap, rate, is_active, seen, is_settled });
        self.flows.len() as u32 - 1
    }

    /// The rate of a flow; of one that was changed, after [`compute`](Self::compute).
    pub fn rate(&self, flow: FlowId) -> f64 {
        self.flows[flow as usize].rate
    }

    /// What a flow uses.
    pub fn uses(&self, flow: FlowId) -> impl Iterator<Item = Use> + '_ {
        self.flows[flow as usize].places.iter().map(|place| place.used)
    }

    /// Whether a flow is active.
    pub fn is_active(&self, flow: FlowId) -> bool {
        self.flows[flow as usize].is_active
    }

    /// The capacity of a resource.
    pub fn capacity(&self, resource: ResourceId) -> f64 {
        self.resources[resource as usize].capacity
    }

    /// How much of a resource is in use.
    pub fn load(&self, resource: ResourceId) -> f64 {
        let flows = &self.resources[resource as usize].flows;
        let load = |&(flow, place): &(FlowId, u32)| {
            let flow = &self.flows[flow as usize];
            flow.rate * flow.places[place as usize].used.weight
        };
        flows.iter().map(load).sum()
    }

    fn touch(&mut self, resource: ResourceId) {
        let one = &mut self.resources[resource as usize];
        if !std::mem::replace(&mut one.is_touched, true) {
            self.touched.push(resource);
        }
    }

    fn touch_all(&mut self, flow: FlowId) {
        for place in 0..self.flows[flow as usize].places.len() {
            self.touch(self.flows[flow as usize].places[place].used.resource);
        }
    }

    /// Changes a capacity.
    pub fn set_capacity(&mut self, resource: ResourceId, capacity: f64) {
        if self.resources[resource as usize].capacity != capacity {
            self.resources[resource as usize].capacity = capacity;
            self.touch(resource);
        }
    }

    /// Changes the cap of a flow.
    pub fn set_cap(&mut self, flow: FlowId, cap: f64) {
        let one = &mut self.flows[flow as usize];
        if one.cap != cap {
            one.cap = cap;
            if one.is_active {
                self.touch_all(flow);
            }
        }
    }

    /// Changes what a flow takes of its `place`-th resource.
    pub fn set_weight(&mut self, flow: FlowId, place: usize, weight: f64) {
        let one = &mut self.flows[flow as usize];
        let used = &mut one.places[place].used;
        if used.weight != weight {
            used.weight = weight;
            let resource = used.resource;
            if one.is_active {
                self.touch(resource);
            }
        }
    }

    /// Starts a flow.
    pub fn start(&mut self, flow: FlowId) {
        debug_assert!(!self.flows[flow as usize].is_active);
        self.flows[flow as usize].is_active = true;
        for place in 0..self.flows[flow as usize].places.len() {
            let resource = self.flows[flow as usize].places[place].used.resource;
            let flows = &mut self.resources[resource as usize].flows;
            self.flows[flow as usize].places[place].at = flows.len() as u32;
            flows.push((flow, place as u32));
            self.touch(resource);
        }
    }

    /// Stops a flow. Its rate is 0.
    pub fn stop(&mut self, flow: FlowId) {
        debug_assert!(self.flows[flow as usize].is_active);
        self.flows[flow as usize].is_active = false;
        self.flows[flow as usize].rate = 0.0;
        for place in 0..self.flows[flow as usize].places.len() {
            let Place { used, at } = self.flows[flow as usize].places[place];
            let flows = &mut self.resources[used.resource as usize].flows;
            flows.swap_remove(at as usize);
            if let Some(&(moved, its)) = flows.get(at as usize) {
                self.flows[moved as usize].places[its as usize].at = at;
            }
            self.touch(used.resource);
        }
    }

    /// Whether rates have to be computed again.
    pub fn is_stale(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Computes the rates again that may have changed. Calls `changed(flow, before, now)` for each
    /// that has.
    pub fn compute(&mut self, mut changed: impl FnMut(FlowId, f64, f64)) {
        self.collect();
        self.heap.clear();
        let Self { resources, flows, component, heap, .. } = self;
        for &id in &component.1 {
            let one = &mut resources[id as usize];
            one.left = one.capacity;
            one.growing = one.flows.len() as u32;
            let weight = |&(flow, place): &(FlowId, u32)| {
                flows[flow as usize].places[place as usize].used.weight
            };
            one.weights = one.flows.iter().map(weight).sum();
            heap.push(Reverse((key(one.level()), Limit::Resource(id))));
        }
        for &id in &component.0 {
            let flow = &mut flows[id as usize];
            flow.is_settled = false;
            if flow.cap.is_finite() {
                heap.push(Reverse((key(flow.cap), Limit::Flow(id))));
            }
        }
        let mut settle = |resources: &mut Vec<Resource>, flow: &mut Flow, id: FlowId, rate: f64| {
            flow.is_settled = true;
            for Place { used, .. } in &flow.places {
                let one = &mut resources[used.resource as usize];
                one.left -= used.weight * rate;
                one.weights -= used.weight;
                one.growing -= 1;
            }
            if flow.rate != rate {
                changed(id, flow.rate, rate);
                flow.rate = rate;
            }
        };
        while let Some(Reverse((at, limit))) = heap.pop() {
            match limit {
                Limit::Flow(id) => {
                    let flow = &mut flows[id as usize];
                    let cap = flow.cap;
                    if !flow.is_settled {
                        settle(resources, flow, id, cap);
                    }
                }
                Limit::Resource(id) => {
                    let level = resources[id as usize].level();
                    if level.is_infinite() {
                        continue;
                    }
                    // Others of its flows have settled below: it takes longer to fill it.
                    if level > f64::from_bits(at) * (1.0 + SAME) {
                        heap.push(Reverse((key(level), limit)));
                        continue;
                    }
                    for place in 0..resources[id as usize].flows.len() {
                        let (id, _) = resources[id as usize].flows[place];
                        let flow = &mut flows[id as usize];
                        if !flow.is_settled {
                            let rate = level.min(flow.cap);
                            settle(resources, flow, id, rate);
                        }
                    }
                }
            }
        }
    }

    /// All flows and resources that are connected with what was touched.
    fn collect(&mut self) {
        self.round += 1;
        let Self { resources, flows, touched, round, component, .. } = self;
        component.0.clear();
        component.1.clear();
        for id in touched.drain(..) {
            resources[id as usize].is_touched = false;
            if std::mem::replace(&mut resources[id as usize].seen, *round) != *round {
                component.1.push(id);
            }
        }
        let mut next = 0;
        while let Some(&id) = component.1.get(next) {
            next += 1;
            for at in 0..resources[id as usize].flows.len() {
                let (flow, _) = resources[id as usize].flows[at];
                let one = &mut flows[flow as usize];
                if std::mem::replace(&mut one.seen, *round) == *round {
                    continue;
                }
                component.0.push(flow);
                for Place { used, .. } in &one.places {
                    let resource = &mut resources[used.resource as usize];
                    if std::mem::replace(&mut resource.seen, *round) != *round {
                        component.1.push(used.resource);
                    }
                }
            }
        }
    }
}
