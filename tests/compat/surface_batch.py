"""The batch and the controller: names in `verl.protocol` and `verl.single_controller`."""

BATCH_AND_CONTROLLER = {
    "verl": """
        DataProto
        __version__
    """,
    "verl.base_config": """
        BaseConfig
        BaseConfig.get(key, default=None)
    """,
    "verl.protocol": """
        DataProto(batch=None, non_tensor_batch=..., meta_info=...)
        DataProto.from_dict(
            tensors=None, non_tensors=None, meta_info=None, num_batch_dims=1, auto_padding=False
        )
        DataProto.from_single_dict(data, meta_info=None, auto_padding=False)
        DataProto.from_tensordict(tensor_dict=None, meta_info=None, num_batch_dims=1)
        DataProto.to_tensordict()
        DataProto.to(device)
        DataProto.select(
            batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None, deepcopy=False
        )
        DataProto.select_idxs(idxs)
        DataProto.slice(start=None, end=None, step=None)
        DataProto.pop(batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None)
        DataProto.rename(old_keys=None, new_keys=None)
        DataProto.union(other)
        DataProto.concat(data)
        DataProto.chunk(chunks)
        DataProto.split(split_size)
        DataProto.make_iterator(mini_batch_size, epochs, seed=None, dataloader_kwargs=None)
        DataProto.padding(padding_size, padding_candidate="")
        DataProto.is_padding_enabled()
        DataProto.reorder(indices)
        DataProto.repeat(repeat_times=2, interleave=True)
        DataProto.sample_level_repeat(repeat_times)
        DataProto.unfold_column_chunks(n_split, split_keys=None)
        DataProto.save_to_disk(filepath)
        DataProto.load_from_disk(filepath)
        DataProto.print_size(prefix="")
        DataProto.get_data_info()
        DataProto.check_consistency()
        DataProto.__len__()
        DataProto.__getitem__(_)
        DataProtoItem(batch=None, non_tensor_batch=..., meta_info=...)
        DataProtoConfig
        DataProtoConfig.auto_padding
        DataProtoFuture(collect_fn, futures, dispatch_fn=None)
        DataProtoFuture.concat(_)
        DataProtoFuture.chunk(chunks)
        DataProtoFuture.get()
        pad_dataproto_to_divisor(data, size_divisor)
        unpad_dataproto(data, pad_size)
        union_tensor_dict(_, _)
        union_numpy_dict(_, _)
        list_of_dict_to_dict_of_list(_)
        fold_batch_dim(data, new_batch_size)
        unfold_batch_dim(data, batch_dims=2)
        collate_fn(_)
        serialize_single_tensor(_)
        deserialize_single_tensor(_)
        serialize_tensordict(_)
        deserialize_tensordict(_)
        all_gather_data_proto(data, process_group)
    """,
    "verl.utils.tensordict_utils": """
        assign_non_tensor_data(_, key, val)
        assign_non_tensor_stack(_, key, _)
        assign_non_tensor
        unwrap_non_tensor_data(_)
        get_non_tensor_data(data, key, default)
        concat_nested_tensors(_)
        concat_tensordict_with_none_bsz(_)
        concat_tensordict(_)
        chunk_tensordict(td, chunks)
        get_tensordict(tensor_dict, non_tensor_dict=None)
        index_select_tensor_dict(batch, indices)
        union_tensor_dict(_, _)
        make_iterator(_, mini_batch_size, epochs, seed=None, dataloader_kwargs=None)
        assert_tensordict_eq(_, _)
        get(_, key, default=None)
        get_keys(_, keys)
        pop(_, key, default=None)
        pop_keys(_, keys)
        pad_to_divisor(_, _)
        unpad(_, _)
        contiguous(_)
        maybe_fix_3d_position_ids(_)
    """,
    "verl.single_controller": """
        Worker
        WorkerGroup
        ClassWithInitArgs
        ResourcePool
        __version__
    """,
    "verl.single_controller.base": """
        Worker(cuda_visible_devices=None)
        WorkerGroup(resource_pool)*
        ClassWithInitArgs(cls)*
        ResourcePool(process_on_nodes=None, max_colocate_count=10, n_gpus_per_node=8)
        ResourcePool.add_node(_)
        ResourcePool.world_size
        ResourcePool.store
        ResourcePool.local_world_size_list()
        ResourcePool.local_rank_list()
        WorkerGroup.world_size
        WorkerGroup.start_worker_aliveness_check(every_n_seconds=1)
        WorkerGroup._bind_worker_method
    """,
    "verl.single_controller.base.worker": """
        Worker
        Worker.world_size
        Worker.rank
        Worker.get_master_addr_port()
        Worker.get_cuda_visible_devices()
        Worker.get_available_master_addr_port()
        Worker.get_availale_master_addr_port()
        Worker.env_keys()
        Worker.get_fused_worker_by_name(_)
        Worker._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)
        Worker._query_dispatch_info(_)
        Worker._query_collect_info(_)
        Worker.query_collect_info(_)
        Worker.get_dispatch_collect()
        Worker.set_dispatch_collect(mesh_name, dispatch_dp_rank, collect_dp_rank)
        Worker.execute_with_func_generator(func)*
        Worker.execute_func_rank_zero(func)*
        DistRankInfo(tp_rank, dp_rank, pp_rank, cp_rank)
        DistGlobalInfo(tp_size, dp_size, pp_size, cp_size)
    """,
    "verl.single_controller.base.decorator": """
        register(dispatch_mode=..., execute_mode=..., blocking=True, materialize_futures=True)
        MAGIC_ATTR
        Dispatch
        Dispatch.register(name)
        Dispatch.remove(name)
        Dispatch.from_name(name)
        Execute
        DISPATCH_MODE_FN_REGISTRY
        register_dispatch_mode(_, dispatch_fn, collect_fn)
        update_dispatch_mode(_, dispatch_fn, collect_fn)
        get_predefined_dispatch_fn(_)
        get_predefined_execute_fn(_)
        _check_dispatch_mode(_)
        make_nd_compute_dataproto_dispatch_fn(mesh_name)
        dispatch_one_to_all
        dispatch_all_to_all
        collect_all_to_all
        dispatch_dp_compute
        collect_dp_compute
        dispatch_dp_compute_data_proto
        dispatch_dp_compute_data_proto_with_func
        collect_dp_compute_data_proto
        dispatch_nd_compute(_, dp_size, _)*
        collect_nd_compute(_, _, _)
        dispatch_nd_compute_dataproto
        collect_nd_compute_dataproto
        dispatch_lazy_compute_data_proto
        collect_lazy_compute_data_proto
    """,
    "verl.single_controller.ray": """
        RayWorkerGroup
        RayResourcePool
        SubRayResourcePool
        RayClassWithInitArgs
        ResourcePoolManager
        create_colocated_worker_cls
        create_colocated_worker_cls_fused
    """,
    "verl.single_controller.ray.base": """
        get_random_string(length)
        RayResourcePool(
            process_on_nodes=None, use_gpu=True, name_prefix=None, max_colocate_count=10,
            detached=False, accelerator_type=None
        )
        RayResourcePool.get_placement_groups(
            strategy="STRICT_PACK", name=None, device_name="cuda"
        )
        SubRayResourcePool(placement_groups, start_bundle_index, subgroup_world_size)*
        split_resource_pool(_, split_size)
        merge_resource_pool(_, _)
        extract_pg_from_exist(_, _, _)
        ResourcePoolManager(resource_pool_spec, mapping, resource_pool_dict=...)
        ResourcePoolManager.create_resource_pool()
        ResourcePoolManager.get_resource_pool(role)
        ResourcePoolManager.get_n_gpus()
        RayClassWithInitArgs(cls)*
        RayClassWithInitArgs.update_options(_)
        RayClassWithInitArgs.set_additional_resource(_)
        RayClassWithInitArgs.__call__(
            placement_group, placement_group_bundle_idx, use_gpu=True, num_gpus=1,
            sharing_with=None, device_name="cuda"
        )
        RayWorkerGroup(
            resource_pool=None, ray_cls_with_init=None, bin_pack=True, name_prefix=None,
            detached=False, worker_names=None, worker_handles=None,
            ray_wait_register_center_timeout=300
        )*
        RayWorkerGroup.from_detached(
            name_prefix=..., worker_names=..., worker_handles=..., ray_cls_with_init=...
        )
        RayWorkerGroup.spawn(prefix_set)
        RayWorkerGroup.fuse(prefix_set)
        RayWorkerGroup.execute_all(method_name)*
        RayWorkerGroup.execute_all_sync(method_name)*
        RayWorkerGroup.execute_all_async(method_name)*
        RayWorkerGroup.execute_rank_zero(method_name)*
        RayWorkerGroup.execute_rank_zero_sync(method_name)*
        RayWorkerGroup.execute_rank_zero_async(method_name)*
        RayWorkerGroup.workers
        RayWorkerGroup.worker_names
        RayWorkerGroup.world_size
        RayWorkerGroup.master_address
        RayWorkerGroup.master_port
        create_colocated_worker_cls(class_dict)
        create_colocated_worker_cls_fused(class_dict)
        create_colocated_worker_raw_cls
    """,
}
